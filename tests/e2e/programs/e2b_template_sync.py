# SPDX-License-Identifier: AGPL-3.0-only
"""A tour of the published ``e2b`` package's templates, sync. Prints its results as JSON.

Arguments: an image that can be pulled, and a directory to write a context into.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path

from e2b import BuildException, Sandbox, Template, wait_for_port

IMAGE, CONTEXT = sys.argv[1], Path(sys.argv[2])
RUN = uuid.uuid4().hex
"""So that nothing is known of what an earlier run built."""
passed: list[str] = []
failed: dict[str, str] = {}


def step(work: Callable[[], None]) -> Callable[[], None]:
    try:
        work()
        passed.append(work.__name__)
    except Exception:
        failed[work.__name__] = traceback.format_exc()[-2_000:]
    return work


def template() -> object:
    return (
        Template(file_context_path=str(CONTEXT))
        .from_template("base")
        .set_envs({"COLOUR": "green", "RUN": RUN})
        .run_cmd("echo one > ~/one")
        .set_workdir("/home/user/app")
        .copy("a.txt", "b.txt")
        .copy("src/*.py", "/opt/py/", mode=0o700)
        .copy("src", "/opt/all", user="root")
        .run_cmd("test -f b.txt && cat ~/one && echo colour is $COLOUR")
        .run_cmd("id -un > /who", user="root")
        .make_dir("/home/user/made")
        .set_start_cmd("python3 -m http.server 8000", wait_for_port(8000))
    )


CONTEXT.mkdir(parents=True, exist_ok=True)
(CONTEXT / "a.txt").write_text("from the context\n")
(CONTEXT / "src").mkdir(exist_ok=True)
for name in ("x.py", "y.py", "z.txt"):
    (CONTEXT / "src" / name).write_text(name)


@step
def builds() -> None:
    assert not Template.exists("tour")
    lines: list[str] = []
    info = Template.build(
        template(), "tour:v1", tags=["v2"], cpu_count=1, memory_mb=512,
        on_build_logs=lambda entry: lines.append(entry.message),
    )  # fmt: skip
    assert info.name == "tour:v1"
    assert "colour is green" in lines, lines
    assert Template.exists("tour")


@step
def sandbox_has_files_and_the_running_command() -> None:
    with Sandbox.create("tour:v1") as sandbox:
        assert sandbox.files.read("/home/user/app/b.txt") == "from the context\n"
        assert sandbox.files.read("/who") == "root\n"
        listed = sandbox.commands.run("ls /opt/py; stat -c '%a %U' /opt/py/x.py /opt/all/z.txt")
        assert listed.stdout == "x.py\ny.py\n700 user\n644 root\n", listed.stdout
        assert sandbox.commands.run("pwd; echo $COLOUR").stdout == "/home/user/app\ngreen\n"
        page = sandbox.commands.run("curl -s -o /dev/null -w '%{http_code}' localhost:8000/b.txt")
        assert page.stdout == "200", page


@step
def second_build_is_cached() -> None:
    lines: list[str] = []
    Template.build(template(), "tour", on_build_logs=lambda entry: lines.append(entry.message))
    assert sum("(cached)" in line for line in lines) == 7, lines


@step
def background_and_status() -> None:
    info = Template.build_in_background(Template().from_template("tour").run_cmd("echo bg"), "bg")
    offset = 0
    messages: list[str] = []
    while True:
        status = Template.get_build_status(info, logs_offset=offset)
        offset += len(status.log_entries)
        messages += [entry.message for entry in status.log_entries]
        if status.status in ("ready", "error"):
            break
        time.sleep(0.1)
    assert status.status == "ready", status.reason
    assert "bg" in messages


@step
def tags() -> None:
    Template.assign_tags("tour:v1", ["stable", "old"])
    Template.remove_tags("tour", "old")
    found = {tag.tag for tag in Template.get_tags("tour")}
    assert found == {"default", "v1", "v2", "stable"}, found


@step
def failing_step_raises() -> None:
    bad = Template().from_template("base").run_cmd("echo fine").run_cmd("echo why >&2; exit 9")
    try:
        Template.build(bad, "bad")
    except BuildException as exc:
        assert "exited with code 9" in str(exc), exc
        assert "why" in str(exc), exc
        frames = traceback.extract_tb(exc.__traceback__)
        assert any("run_cmd" in (frame.line or "") for frame in frames), frames
    else:
        raise AssertionError("it did not fail")


@step
def from_an_image() -> None:
    built = (
        Template()
        .from_image(IMAGE)
        .set_envs({"RUN": RUN})
        .run_cmd(["id -un", "pwd", "echo hello > ~/hello"])
    )
    lines: list[str] = []
    Template.build(built, "pulled", on_build_logs=lambda entry: lines.append(entry.message))
    assert "user" in lines, lines
    assert "/home/user" in lines, lines
    with Sandbox.create("pulled") as sandbox:
        assert sandbox.files.read("hello") == "hello\n"


@step
def missing_image_raises() -> None:
    try:
        Template.build(Template().from_image(IMAGE + "-missing"), "missing")
    except BuildException:
        return
    raise AssertionError("it did not fail")


print(json.dumps({"passed": passed, "failed": failed}))
