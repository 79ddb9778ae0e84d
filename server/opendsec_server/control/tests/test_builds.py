# SPDX-License-Identifier: AGPL-3.0-only
"""Builds of templates over a fake node: steps, cache, failures, cancels, restarts."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import io
import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from opendsec_server.config import Config
from opendsec_server.contract.errors import (
    BuildNotFound,
    Conflict,
    Forbidden,
    InvalidRequest,
    NodeFull,
    OpendsecError,
    PayloadTooLarge,
    QuotaExceeded,
    RegistryLimited,
    SnapshotFailed,
    StartTimeout,
    TemplateNotFound,
)
from opendsec_server.contract.images import ImageConfig, ReadyCheck, RegistryAuth
from opendsec_server.contract.states import TERMINAL
from opendsec_server.control.builds.logs import ENDED_IN_MEMORY_MAX, BuildLogs
from opendsec_server.control.builds.plan import BuildPlan, BuildStep, Stage
from opendsec_server.control.builds.service import BuildRequest
from opendsec_server.control.builds.turns import Turns
from opendsec_server.control.iam import Caller
from opendsec_server.control.params import CreateParams
from opendsec_server.control.services import Services
from opendsec_server.store.records import TemplateBuild
from opendsec_server.store.templates import BuildFilter

from .conftest import first_caller
from .fake_node import FakeNode

pytestmark = pytest.mark.asyncio


async def in_project(services: Services, caller: Caller, name: str) -> Caller:
    """In a project with this id, or a new one of this name."""
    if not name.startswith("p") or len(name) != 16:
        name = (await services.projects.create(caller, name, None, {})).project.project_id
    key = services.config.api_key_file.read_text().strip()
    return await services.iam.authenticate(key, name)


def run(command: str, **more: object) -> BuildStep:
    return BuildStep(type="RUN", args=(command,), **more)  # type: ignore[arg-type]


def on_base(*steps: BuildStep, **more: object) -> BuildPlan:
    stage = Stage(name="only", from_template="base", steps=steps)
    return BuildPlan(stages=(stage,), **more)  # type: ignore[arg-type]


def on_image(image: str, *steps: BuildStep, **more: object) -> BuildPlan:
    stage = Stage(name="only", from_image=image, steps=steps)
    return BuildPlan(stages=(stage,), **more)  # type: ignore[arg-type]


async def begin(
    services: Services, caller: Caller, plan: BuildPlan, name: str = "mine"
) -> TemplateBuild:
    _template, build = await services.builds.request(
        caller, BuildRequest(name=name, envd_version="0.9.1")
    )
    await services.builds.start(caller, build, plan)
    return build


async def ended(services: Services, caller: Caller, build: TemplateBuild) -> TemplateBuild:
    async with asyncio.timeout(10):
        while True:
            found = await services.builds.by_id(caller, build.build_id)
            if found.state in ("ready", "error"):
                return found
            await asyncio.sleep(0.005)


async def built(
    services: Services, caller: Caller, plan: BuildPlan, name: str = "mine"
) -> TemplateBuild:
    return await ended(services, caller, await begin(services, caller, plan, name))


async def messages(services: Services, build: TemplateBuild) -> list[str]:
    return [entry.message for entry in await services.builds.logs.read(build.build_id)]


def archive(**files: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name.replace("__", "/").replace("_dot_", "."))
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()


async def send(services: Services, caller: Caller, content: bytes) -> str:
    name = hashlib.sha256(content).hexdigest()

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(content), 100):
            yield content[start : start + 100]

    await services.builds.uploads.receive(
        caller.project_id, name, chunks(), length_bytes=len(content)
    )
    return name


async def test_a_sandbox_of_a_built_template_has_what_its_steps_made(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    plan = on_base(
        BuildStep(type="ENV", args=("COLOUR", "green", "SIZE", "9")),
        BuildStep(type="WORKDIR", args=("/app",)),
        run("write /app/a one\necho colour is\nenv COLOUR"),
        BuildStep(type="WORKDIR", args=("sub",)),
        BuildStep(type="USER", args=("worker",)),
        run("append /app/a two\nwhoami\npwd"),
        start_cmd="serve",
        ready_cmd='[ -n "$(ss -Htuln sport = :8000)" ]',
    )
    build = await built(services, caller, plan)
    assert build.state == "ready", build.error
    created = await services.creates.create(
        caller, CreateParams(template="mine", env={"SIZE": "10"})
    )
    spec = node.specs[created.record.sandbox_id]
    assert node.contents[created.record.sandbox_id].disk["/app/a"] == "onetwo"
    assert spec.env == {"COLOUR": "green", "SIZE": "10"}
    assert (spec.default_user, spec.default_workdir) == ("worker", "/app/sub")
    assert spec.image == build.image
    assert spec.start is not None
    assert spec.start.argv[-1] == "serve"
    assert (spec.start.user, spec.start.workdir) == ("worker", "/app/sub")
    assert spec.start.ready == ReadyCheck(port=8000)
    # The one that it was tried in was such a one: its saved memory fits.
    (tried,) = [s for s in node.specs.values() if s.start and s.sandbox_id != spec.sandbox_id]
    for field in ("image", "start", "cpu", "memory_mb", "disk_mb", "default_user", "network"):
        assert getattr(tried, field) == getattr(spec, field), field
    config = (await node.images.get(build.image or "")).config
    assert (config.user, config.workdir) == ("worker", "/app/sub")
    assert config.env == {"COLOUR": "green", "SIZE": "9"}
    lines = await messages(services, build)
    assert "green" in lines
    assert "worker" in lines
    assert "/app/sub" in lines
    assert lines[-1] == "the template is ready"
    # Nothing of the build is left on the node.
    others = [s for s in node.statuses.values() if s.sandbox_id != created.record.sandbox_id]
    assert others
    assert all(status.state in TERMINAL for status in others)


async def test_second_build_runs_nothing_and_a_change_runs_what_follows_it(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    steps = [run(f"append /a {number}") for number in range(5)]
    first = await built(services, caller, on_base(*steps))
    count = len(node.commands)
    again = await built(services, caller, on_base(*steps), name="other")
    assert again.image == first.image
    assert len(node.commands) == count
    assert sum("(cached)" in line for line in await messages(services, again)) == 5
    steps[3] = run("append /a x")
    changed = await built(services, caller, on_base(*steps))
    assert node.commands[count:] == ["append /a x", "append /a 4"]
    assert node.images.disks[changed.image or ""]["/a"] == "012x4"


async def test_forced_steps_run_and_those_before_them_do_not(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    await built(services, caller, on_base(run("append /a 1"), run("append /a 2")))
    count = len(node.commands)
    plan = on_base(run("append /a 1"), run("append /a 2", force=True), run("append /a 3"))
    await built(services, caller, plan)
    assert node.commands[count:] == ["append /a 2", "append /a 3"]
    await built(services, caller, on_base(run("append /a 1"), force=True))
    assert node.commands[-1] == "append /a 1"


async def test_steps_whose_image_was_pruned_run_again(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    first = await built(services, caller, on_base(run("write /a 1")))
    assert first.image in await services.builds.images_in_use()
    await services.builds.delete(caller, "mine")
    await node.images.prune(keep=list(await services.builds.images_in_use()))
    again = await built(services, caller, on_base(run("write /a 1")))
    assert again.state == "ready"
    assert node.commands.count("write /a 1") == 2


async def test_builds_at_once_share_a_step(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    plan = on_base(run("append /a 1\necho slow"))
    builds = await asyncio.gather(
        *(begin(services, caller, plan, name=f"t{number}") for number in range(6))
    )
    done = [await ended(services, caller, build) for build in builds]
    assert {build.state for build in done} == {"ready"}
    assert len({build.image for build in done}) == 1
    assert node.commands.count("append /a 1\necho slow") == 1


async def test_two_builds_of_one_name_both_end_and_the_last_has_the_tag(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    node.images.gate = asyncio.Event()
    slow = await begin(services, caller, on_image("alpine", run("write /a slow")))
    quick = await built(services, caller, on_base(run("write /a quick")))
    template = await services.templates.resolve(caller, "mine")
    assert (await services.templates.build_of(template, None)).build_id == quick.build_id
    node.images.gate.set()
    assert (await ended(services, caller, slow)).state == "ready"
    assert (await services.templates.build_of(template, None)).build_id == slow.build_id


async def test_image_base_gets_a_user_and_keeps_its_environment(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    build = await built(services, caller, on_image("alpine", run("whoami\npwd\nenv A")))
    assert build.state == "ready", build.error
    assert any("add_user user" in command for command in node.commands)
    lines = await messages(services, build)
    assert {"user", "/home/user", "1"} <= set(lines)
    assert (build.default_user, build.default_workdir) == ("user", "/home/user")
    assert build.env == {"A": "1"}


async def test_dockerfile_style_keeps_the_users_of_the_image(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    node.images.offered["app"] = ({}, ImageConfig(user="app", workdir="/srv"), None)
    build = await built(services, caller, on_image("app", run("whoami\npwd"), style="dockerfile"))
    assert {"app", "/srv"} <= set(await messages(services, build))
    assert (build.default_user, build.default_workdir) == ("app", "/srv")


async def test_template_on_a_template_goes_on_where_it_was(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    lower = on_base(
        BuildStep(type="ENV", args=("A", "1")),
        BuildStep(type="WORKDIR", args=("/w",)),
        run("write /a 1"),
        start_cmd="serve",
    )
    await built(services, caller, lower, name="lower")
    upper = BuildPlan(
        stages=(Stage(name="x", from_template="lower", steps=(run("append /a 2\nenv A\npwd"),)),)
    )
    build = await built(services, caller, upper, name="upper")
    assert node.images.disks[build.image or ""]["/a"] == "12"
    assert build.env == {"A": "1"}
    assert build.start is not None
    assert build.start.argv[-1] == "serve"
    assert "/w" in await messages(services, build)


async def test_copy_takes_files_directories_and_wildcards(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    content = archive(a_dot_txt="A", dir__b_dot_txt="B", dir__c_dot_py="C", dir__sub__d_dot_py="D")
    name = await send(services, caller, content)

    def copy(*args: str) -> BuildStep:
        return BuildStep(type="COPY", args=args, files_hash=name)

    plan = on_base(
        BuildStep(type="WORKDIR", args=("/w",)),
        copy("a.txt", "renamed.txt", "", ""),
        copy("a.txt", "/into/"),
        copy("dir", "/tree", "root", "0755"),
        copy("dir/*.py", "/py/"),
        copy("dir/*", "/every"),
        copy(".", "/all"),
    )
    build = await built(services, caller, plan)
    assert build.state == "ready", build.error
    disk = node.images.disks[build.image or ""]
    assert disk["/w/renamed.txt"] == disk["/into/a.txt"] == disk["/all/a.txt"] == "A"
    assert (disk["/tree/b.txt"], disk["/tree/sub/d.py"]) == ("B", "D")
    assert disk["/py/c.py"] == disk["/every/c.py"] == "C"
    assert disk["/every/d.py"] == "D"
    assert "/py/d.py" not in disk
    assert node.calls.count("unpack") == 6
    count = node.calls.count("pack")
    assert (await built(services, caller, plan)).image == build.image
    assert node.calls.count("pack") == count


async def test_many_sources_are_few_calls(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    names = [f"file-{number:04}-{'x' * 90}" for number in range(200)]
    files = await send(services, caller, archive(**dict.fromkeys(names, "A")))

    def copy(*sources: str, style: str) -> BuildPlan:
        step = BuildStep(
            type="COPY", args=(sources[0], "/all/"), files_hash=files, more_sources=sources[1:]
        )
        return on_base(step, style=style)

    # 20,000 characters of names: more than the head of one call holds.
    build = await built(services, caller, copy(*names, style="dockerfile"))
    assert build.state == "ready", build.error
    assert node.calls.count("unpack") == 3
    disk = node.images.disks[build.image or ""]
    assert {path for path in disk if path.startswith("/all/")} == {f"/all/{n}" for n in names}
    few = await built(services, caller, copy("file-000*", "*1-x*", style="dockerfile"))
    assert few.state == "ready", few.error
    assert node.calls.count("unpack") == 4
    for sources, told in (
        (("file-*", "none-*"), "none-*"),
        (("y" * 8_193,), "more than 8192 characters"),
    ):
        for style in ("dockerfile", "e2b"):
            failed = await built(services, caller, copy(*sources, style=style))
            assert (failed.state, failed.error_code) == ("error", "build_failed")
            assert told in (failed.error or ""), failed.error


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (BuildStep(type="TELEPORT"), "step 2: TELEPORT is no step"),
        (BuildStep(type="RUN", args=()), "step 2: RUN needs"),
        (BuildStep(type="ENV", args=("A",)), "pairs"),
        (BuildStep(type="ENV", args=("A=B", "c")), "cannot set"),
        (BuildStep(type="COPY", args=("a",), files_hash="0" * 64), "source and target"),
        (BuildStep(type="COPY", args=("../a", "/b"), files_hash="0" * 64), "outside"),
        (BuildStep(type="COPY", args=("a", "/b")), "hash"),
        (BuildStep(type="COPY", args=("a", "/b"), files_hash="../../etc/passwd"), "hash"),
        (BuildStep(type="COPY", args=("a", "/b", "x y"), files_hash="0" * 64), "owner"),
        (BuildStep(type="COPY", args=("a", "/b", "", "9"), files_hash="0" * 64), "octal"),
        (BuildStep(type="USER", args=("a b; rm -rf /",)), "user"),
        (BuildStep(type="RUN", args=("a\0b",)), "NUL"),
    ],
)
async def test_a_step_that_cannot_work_is_named_before_anything_runs(
    services: Services, caller: Caller, node: FakeNode, step: BuildStep, told: str
) -> None:
    build = await built(services, caller, on_base(run("echo 1"), step))
    assert (build.state, build.error_code, build.error_step) == ("error", "build_failed", "2")
    assert told in (build.error or "")
    assert node.commands == []


async def test_failing_command_is_told_with_exit_code_and_output(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    build = await built(
        services, caller, on_base(run("echo 1"), run("echo before\nwarn it broke\nexit 7"))
    )
    assert (build.state, build.error_code, build.error_step) == ("error", "build_failed", "2")
    assert "exited with code 7" in (build.error or "")
    assert "it broke" in (build.error or "")
    assert build.image is None
    with pytest.raises(TemplateNotFound, match="no finished build"):
        await services.creates.create(caller, CreateParams(template="mine"))
    assert all(status.state in TERMINAL for status in node.statuses.values())
    entries = await services.builds.logs.read(build.build_id)
    assert entries[-1].level == "error"
    assert [e.level for e in entries if e.message == "it broke"] == ["warn"]
    assert {e.step for e in entries} == {"base", "1", "2"}


@pytest.mark.parametrize(
    ("plan", "code", "step"),
    [
        (on_image("nowhere"), "image_not_found", "base"),
        (on_base(run("die 9")), "build_failed", "1"),
        (BuildPlan(stages=(Stage(name="a", from_template="nope"),)), "template_not_found", "base"),
        (BuildPlan(stages=(Stage(name="a"),)), "not_supported", "base"),
        (
            on_base(BuildStep(type="COPY", args=("a", "/a"), files_hash="0" * 64)),
            "build_failed",
            "1",
        ),
    ],
)
async def test_failures_say_where_and_what(
    services: Services, caller: Caller, plan: BuildPlan, code: str, step: str
) -> None:
    build = await built(services, caller, plan)
    assert (build.error_code, build.error_step) == (code, step)


async def test_damaged_and_missing_files_are_the_callers(
    services: Services, caller: Caller
) -> None:
    damaged = await send(services, caller, b"not a tar" * 500)
    for files_hash, source in ((damaged, "a"), (damaged, "*.py")):
        build = await built(
            services,
            caller,
            on_base(BuildStep(type="COPY", args=(source, "/a"), files_hash=files_hash)),
        )
        assert build.error_code == "build_failed"
    name = await send(services, caller, archive(a="1"))
    for source in ("b", "*.py"):
        build = await built(
            services, caller, on_base(BuildStep(type="COPY", args=(source, "/a"), files_hash=name))
        )
        assert build.error_code == "build_failed", build.error


async def test_failing_start_command_fails_the_build_at_its_end(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    node.fail_start = StartTimeout("port 8000: nothing listens")
    build = await built(services, caller, on_base(run("echo 1"), start_cmd="serve"))
    assert (build.state, build.error_step) == ("error", "finalize")
    assert "nothing listens" in (build.error or "")
    node.fail_start = None
    assert (await built(services, caller, on_base(start_cmd="serve"))).state == "ready"


async def test_faults_of_the_platform_stay_faults_of_the_platform(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    node.fail["pack"] = SnapshotFailed("no space")
    build = await built(services, caller, on_base(run("echo 1")))
    assert (build.error_code, build.error_step) == ("snapshot_failed", "1")
    del node.fail["pack"]
    node.images.fail_pull = RegistryLimited("too many", retry_after_s=9)
    build = await built(services, caller, on_image("alpine"))
    assert build.error_code == "registry_limited"
    assert all(status.state in TERMINAL for status in node.statuses.values())


async def test_registry_password_is_in_no_log_and_no_image(
    services: Services, caller: Caller, node: FakeNode, config: Config
) -> None:
    auth = RegistryAuth(username="me", password="very-secret")
    node.images.offered["private"] = ({}, ImageConfig(), auth)
    refused = await built(services, caller, on_image("private"))
    assert refused.error_code == "registry_denied"
    plan = on_image("private", run("echo very-secret\nexit 1"), auth=auth)
    build = await built(services, caller, plan)
    assert "very-secret" not in (build.error or "")
    assert "***" in await messages(services, build)
    for path in Path(config.state_dir).rglob("*"):
        if path.is_file():
            assert b"very-secret" not in path.read_bytes(), path


async def test_cancel_ends_a_running_build_and_frees_its_sandbox(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    build = await begin(services, caller, on_base(run("echo 1"), run("block")))
    while "block" not in node.commands:
        await asyncio.sleep(0.005)
    await services.builds.cancel(build.build_id)
    found = await services.builds.by_id(caller, build.build_id)
    assert (found.state, found.error_code) == ("error", "build_cancelled")
    assert all(status.state in TERMINAL for status in node.statuses.values())
    with pytest.raises(Conflict):
        await services.builds.cancel(build.build_id)
    # What was done is kept.
    count = len(node.commands)
    await built(services, caller, on_base(run("echo 1")))
    assert len(node.commands) == count


async def test_more_builds_than_a_project_may_have_are_refused(
    config: Config, node: FakeNode
) -> None:
    config = msgspec.structs.replace(config, project_builds_max=2, builds_parallel_max=1)
    services = await Services.start(config, node)
    try:
        caller = await first_caller(services)
        running = [await begin(services, caller, on_base(run("block"))) for _ in range(2)]
        with pytest.raises(QuotaExceeded):
            await begin(services, caller, on_base())
        # The second waits for the first.
        while "block" not in node.commands:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        assert node.commands.count("block") == 1
        await services.builds.cancel(running[1].build_id)
        await services.builds.cancel(running[0].build_id)
        assert (await built(services, caller, on_base())).state == "ready"
    finally:
        await services.stop()


async def test_archives_that_come_at_once_never_pass_the_limit(
    services: Services, caller: Caller
) -> None:
    uploads = services.builds.uploads
    uploads.project_bytes_max = 7
    half, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"1"
        half.set()
        await go_on.wait()
        yield b"234"

    async def quick() -> AsyncIterator[bytes]:
        yield b"1234"

    first = asyncio.create_task(
        uploads.receive(caller.project_id, "a" * 64, slow(), length_bytes=None)
    )
    await half.wait()
    await uploads.receive(caller.project_id, "b" * 64, quick(), length_bytes=None)
    go_on.set()
    with pytest.raises(QuotaExceeded):
        await first
    assert not uploads.present(caller.project_id, "a" * 64)
    # To be sent anew is not more.
    await uploads.receive(caller.project_id, "b" * 64, quick(), length_bytes=None)


async def test_projects_take_turns(config: Config, node: FakeNode) -> None:
    config = msgspec.structs.replace(config, builds_parallel_max=1)
    services = await Services.start(config, node)
    try:
        first = await first_caller(services)
        one, two = [await in_project(services, first, name) for name in ("one", "two")]
        blocker = await begin(services, one, on_base(run("block")))
        while "block" not in node.commands:
            await asyncio.sleep(0.005)
        for number in range(5):
            await begin(services, one, on_base(run(f"one {number}")), f"one-{number}")
        last = [await begin(services, two, on_base(run(f"two {n}")), f"two-{n}") for n in range(2)]
        await services.builds.cancel(blocker.build_id)
        for build in last:
            assert (await ended(services, two, build)).state == "ready"
        ran = [command[:3] for command in node.commands if command[:3] in ("one", "two")]
        assert ran.index("two") <= 1 and ran[:4].count("two") == 2, ran
    finally:
        await services.stop()


async def test_a_build_counts_while_it_is_at_work(
    services: Services, node: FakeNode, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opendsec_server.control.builds.service.QUOTA_LOOK_S", 0.01)
    quota = {"sandboxes": 1, "cpu": 4, "memory_mb": 4096}
    made = await services.projects.create(caller, "small", None, quota)
    small = await in_project(services, caller, made.project.project_id)

    async def use() -> float:
        return (await services.projects.get(caller, small.project_id)).use["sandboxes"]

    build = await begin(services, small, on_base(run("block")))
    while "block" not in node.commands:
        await asyncio.sleep(0.005)
    assert await use() == 1
    with pytest.raises(QuotaExceeded):
        await services.creates.create(small, CreateParams())
    # One more waits, and holds up no other project.
    waiting = await begin(services, small, on_base(run("later")), "later")
    assert (await built(services, caller, on_base(run("other")))).state == "ready"
    assert "later" not in node.commands
    await services.builds.cancel(build.build_id)
    assert (await ended(services, small, waiting)).state == "ready"
    assert await use() == 0
    assert any("waits" in message for message in await messages(services, waiting))
    sandbox = (await services.creates.create(small, CreateParams())).record.sandbox_id
    waiting = await begin(services, small, on_base(run("later 2")), "later")
    while not any("waits" in message for message in await messages(services, waiting)):
        await asyncio.sleep(0.005)
    await services.builds.cancel(waiting.build_id)
    assert (await ended(services, small, waiting)).error_code == "build_cancelled"
    await services.lifecycle.kill(small, sandbox)
    # What never fits is told at once.
    tiny = (await services.projects.create(caller, "tiny", None, {"cpu": 1})).project.project_id
    failed = await built(services, await in_project(services, caller, tiny), on_base())
    assert (failed.state, failed.error_code) == ("error", "quota_exceeded")
    assert "processors" in (failed.error or "")


async def test_a_template_that_is_deleted_while_it_is_built_gives_its_place_back(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    await begin(services, caller, on_base(run("block")))
    while "block" not in node.commands:
        await asyncio.sleep(0.005)
    await services.builds.delete(caller, "mine")
    assert (await services.projects.get(caller, caller.project_id)).use["sandboxes"] == 0


async def test_turns_are_given_back_by_who_goes_away() -> None:
    turns = Turns(2)
    inside: list[str] = []

    async def work(name: str) -> None:
        async with turns.turn(name[0]):
            inside.append(name)
            await asyncio.Event().wait()

    tasks = {name: asyncio.create_task(work(name)) for name in ("a1", "a2", "a3", "a4", "b1")}

    async def settle() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    await settle()
    assert inside == ["a1", "a2"]
    tasks["a3"].cancel()
    await settle()
    tasks["a1"].cancel()
    await settle()
    assert inside == ["a1", "a2", "b1"]
    # A turn that was given at the moment when its task went away.
    tasks["a2"].cancel()
    tasks["a4"].cancel()
    await settle()
    late = asyncio.create_task(work("c1"))
    await settle()
    assert inside[-1] == "c1"
    for task in (*tasks.values(), late):
        task.cancel()
    await asyncio.gather(*tasks.values(), late, return_exceptions=True)
    assert (turns._free, turns._at_work, turns._waiting) == (2, {}, {})


async def test_a_build_that_takes_too_long_is_ended(config: Config, node: FakeNode) -> None:
    services = await Services.start(msgspec.structs.replace(config, build_timeout_s=1), node)
    try:
        caller = await first_caller(services)
        build = await built(services, caller, on_base(run("echo 1"), run("block")))
        assert (build.error_code, build.error_step) == ("build_failed", "2")
        assert "longer than 1 s" in (build.error or "")
        assert all(status.state in TERMINAL for status in node.statuses.values())
    finally:
        await services.stop()


async def test_a_killed_server_leaves_no_half_build(config: Config, node: FakeNode) -> None:
    services = await Services.start(config, node)
    caller = await first_caller(services)
    build = await begin(services, caller, on_base(run("write /a 1"), run("block")))
    _template, waiting = await services.builds.request(
        caller, BuildRequest(name="later", envd_version="0.9.1")
    )
    while "block" not in node.commands:
        await asyncio.sleep(0.005)
    # As after kill -9: nothing is told to anyone.
    for job in services.builds._jobs.values():
        job.runner = None
    await services.watcher.stop()
    again = await Services.start(config, node)
    try:
        found = await again.builds.by_id(caller, build.build_id)
        assert (found.state, found.error_code) == ("error", "build_interrupted")
        assert found.image is None
        assert all(status.state in TERMINAL for status in node.statuses.values())
        # One whose files were still being sent can go on.
        await again.builds.start(caller, waiting, on_base(run("write /a 1")))
        assert (await ended(again, caller, waiting)).state == "ready"
        assert node.commands.count("write /a 1") == 1
    finally:
        await again.stop()
        await services.stop()


async def test_a_stopped_server_removes_its_builders(config: Config, node: FakeNode) -> None:
    services = await Services.start(config, node)
    caller = await first_caller(services)
    await begin(services, caller, on_base(run("block")))
    while "block" not in node.commands:
        await asyncio.sleep(0.005)
    await services.stop()
    assert all(status.state in TERMINAL for status in node.statuses.values())


async def test_a_builder_is_never_adopted_as_a_sandbox(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    build = await begin(services, caller, on_base(run("block")))
    while "block" not in node.commands:
        await asyncio.sleep(0.005)
    await services.watcher.reconcile()
    (status,) = [s for s in node.statuses.values() if s.state not in TERMINAL]
    assert services.builds.is_builder(status)
    assert (await services.builds.by_id(caller, build.build_id)).state == "building"
    await services.builds.cancel(build.build_id)


async def test_deleted_template_is_gone_and_its_sandboxes_go_on(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    build = await built(services, caller, on_base(run("write /a 1")))
    created = await services.creates.create(caller, CreateParams(template="mine"))
    await services.builds.delete(caller, "mine")
    assert node.statuses[created.record.sandbox_id].state == "running"
    with pytest.raises(TemplateNotFound):
        await services.creates.create(caller, CreateParams(template="mine"))
    with pytest.raises(BuildNotFound):
        await services.builds.by_id(caller, build.build_id)
    assert await services.builds.logs.read(build.build_id) == []
    with pytest.raises(TemplateNotFound):
        await services.builds.delete(caller, "mine")


async def test_deleting_a_template_ends_its_builds(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    await begin(services, caller, on_base(run("block")))
    while "block" not in node.commands:
        await asyncio.sleep(0.005)
    await services.builds.delete(caller, "mine")
    assert all(status.state in TERMINAL for status in node.statuses.values())


async def test_tags_mean_builds(services: Services, caller: Caller, node: FakeNode) -> None:
    one = await built(services, caller, on_base(run("write /a 1")), name="mine:v1")
    two = await built(services, caller, on_base(run("write /a 2")), name="mine:v2")
    for reference, build in (("mine:v1", one), ("mine:v2", two)):
        created = await services.creates.create(caller, CreateParams(template=reference))
        assert node.specs[created.record.sandbox_id].image == build.image
    with pytest.raises(TemplateNotFound, match="no finished build with the tag `default`"):
        await services.creates.create(caller, CreateParams(template="mine"))
    await services.builds.assign_tags(caller, "mine:v1", ["default", "stable"])
    scoped = f"{caller.project_id}/mine"
    created = await services.creates.create(caller, CreateParams(template=scoped))
    assert node.specs[created.record.sandbox_id].image == one.image
    template = await services.templates.resolve(caller, "mine")
    assert {t.tag for t in await services.builds.tags(template)} == {
        "v1", "v2", "default", "stable"
    }  # fmt: skip
    await services.builds.remove_tags(caller, "mine", ["stable"])
    with pytest.raises(TemplateNotFound):
        await services.creates.create(caller, CreateParams(template="mine:stable"))
    with pytest.raises(InvalidRequest, match="default"):
        await services.builds.remove_tags(caller, "mine", ["default"])
    with pytest.raises(TemplateNotFound):
        await services.builds.remove_tags(caller, "mine", ["never"])
    with pytest.raises(Forbidden):
        await services.builds.assign_tags(caller, "base", ["x"])


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        (BuildRequest(name="a" * 300, envd_version="1"), InvalidRequest),
        (BuildRequest(name="a" * 129, envd_version="1"), InvalidRequest),
        (BuildRequest(name="", envd_version="1"), InvalidRequest),
        (BuildRequest(name="a b", envd_version="1"), InvalidRequest),
        (BuildRequest(name="../x", envd_version="1"), InvalidRequest),
        (BuildRequest(name="other/x", envd_version="1"), Forbidden),
        (BuildRequest(name="x", tags=("a b",), envd_version="1"), InvalidRequest),
        (BuildRequest(name="x", tags=("t",) * 33, envd_version="1"), InvalidRequest),
        (BuildRequest(name="x", cpu=1_000, envd_version="1"), InvalidRequest),
        (BuildRequest(name="x", memory_mb=1, envd_version="1"), InvalidRequest),
    ],
)
async def test_refused_requests_make_nothing(
    services: Services, caller: Caller, wanted: BuildRequest, error: type[OpendsecError]
) -> None:
    before = len(await services.templates.visible(caller))
    with pytest.raises(error):
        await services.builds.request(caller, wanted)
    services.templates.forget()
    assert len(await services.templates.visible(caller)) == before


async def test_a_build_is_started_once(services: Services, caller: Caller) -> None:
    build = await begin(services, caller, on_base())
    with pytest.raises(Conflict, match="started before"):
        await services.builds.start(caller, build, on_base())
    assert (await ended(services, caller, build)).state == "ready"


async def test_files_are_there_whole_or_not_at_all(
    services: Services, caller: Caller, config: Config
) -> None:
    uploads = services.builds.uploads
    name = "a" * 64

    async def cut() -> AsyncIterator[bytes]:
        yield b"half"
        raise ConnectionError

    async def short() -> AsyncIterator[bytes]:
        yield b"half"

    with pytest.raises(ConnectionError):
        await uploads.receive(caller.project_id, name, cut(), length_bytes=None)
    with pytest.raises(InvalidRequest, match="announced"):
        await uploads.receive(caller.project_id, name, short(), length_bytes=10)
    with pytest.raises(PayloadTooLarge):
        await uploads.receive(caller.project_id, name, short(), length_bytes=5 << 30)
    uploads.bytes_max = 3
    with pytest.raises(PayloadTooLarge):
        await uploads.receive(caller.project_id, name, short(), length_bytes=None)
    assert not uploads.present(caller.project_id, name)
    folder = Path(config.state_dir) / "builds" / "files" / caller.project_id
    assert list(folder.iterdir()) == []
    uploads.bytes_max = 100
    await uploads.receive(caller.project_id, name, short(), length_bytes=4)
    assert uploads.present(caller.project_id, name)
    assert (folder / name).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    # All of a project's have a limit too, which what comes anew does not meet twice.
    uploads.project_bytes_max = 7
    await uploads.receive(caller.project_id, name, short(), length_bytes=4)
    for announced in (4, None):
        with pytest.raises(QuotaExceeded) as full:
            await uploads.receive(caller.project_id, "b" * 64, short(), length_bytes=announced)
        assert full.value.details["use"] == 4
    await uploads.receive("another", "b" * 64, short(), length_bytes=4)
    uploads.project_bytes_max = 8
    begun: list[None] = []

    async def together() -> AsyncIterator[bytes]:
        begun.append(None)
        while len(begun) < 2:
            await asyncio.sleep(0.001)
        yield b"half"

    both = (uploads.receive(caller.project_id, c * 64, together(), length_bytes=None) for c in "cd")
    got = await asyncio.gather(*both, return_exceptions=True)
    assert [type(one) for one in got].count(QuotaExceeded) >= 1
    assert len(list(folder.iterdir())) <= 2


async def test_files_that_nobody_needs_are_removed(
    services: Services, caller: Caller, config: Config, node: FakeNode
) -> None:
    kept, old = await send(services, caller, archive(a="1")), "b" * 64
    folder = Path(config.state_dir) / "builds" / "files" / caller.project_id
    (folder / old).write_bytes(b"x")
    os.utime(folder / old, (0, 0))
    half = services.builds.uploads.scratch(caller.project_id)
    half.write_bytes(b"half")
    services.builds.uploads.sweep()
    assert sorted(path.name for path in folder.iterdir()) == sorted([half.name, kept])
    await services.stop()
    again = await Services.start(config, node)
    assert [path.name for path in folder.iterdir()] == [kept]
    await again.stop()


async def test_copy_between_stages_is_built_first(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    plan = BuildPlan(
        style="dockerfile",
        stages=(
            Stage(name="unused", from_template="base", steps=(run("write /never 1"),)),
            Stage(name="tools", from_template="base", steps=(run("write /tool 1"),)),
            Stage(
                name="last",
                from_template="base",
                steps=(BuildStep(type="COPY", args=("/tool", "/bin/"), from_stage="tools"),),
            ),
        ),
    )
    build = await built(services, caller, plan)
    # The fake node's `tar` gives nothing to unpack: what counts is what ran, and how it is told.
    assert "write /tool 1" in node.commands
    assert "write /never 1" not in node.commands
    assert (build.error_step, build.error_code) == ("1", "build_failed")


async def test_no_room_for_the_log_fails_the_build(
    services: Services, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(build_id: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(services.builds.logs, "open", full)
    with pytest.raises(NodeFull):
        await begin(services, caller, on_base())
    template = await services.templates.resolve(caller, "mine")
    page = await services.builds.page(BuildFilter(template_id=template.template_id, limit=1))
    assert (page.builds[0].state, page.builds[0].error_code) == ("error", "node_full")


async def test_a_log_is_bounded(
    services: Services, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opendsec_server.control.builds.logs.BUILD_LOG_ENTRIES_MAX", 50)
    command = "\n".join(f"echo {number}" for number in range(500))
    build = await built(services, caller, on_base(run(f"{command}\nexit 1")))
    entries = await services.builds.logs.read(build.build_id)
    assert 50 <= len(entries) < 60
    assert entries[-2].message == "the log is full; more is not kept"
    assert entries[-1].level == "error"


async def test_public_templates_serve_other_projects(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    await built(services, caller, on_base(run("write /a 1")))
    other = msgspec.structs.replace(
        caller, project=msgspec.structs.replace(caller.project, project_id="pother")
    )
    scoped = f"{caller.project_id}/mine"
    for reference in (scoped, "mine"):
        with pytest.raises(TemplateNotFound):
            await services.templates.resolve(other, reference)
    await services.builds.set_public(caller, "mine", True)
    assert (await services.templates.resolve(other, scoped)).public
    with pytest.raises(TemplateNotFound):
        await services.templates.resolve(other, "mine")
    with pytest.raises(Forbidden):
        await services.builds.delete(other, scoped)


async def test_name_of_the_installation_means_the_same_until_the_own_build_is_ready(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    base = (await services.creates.create(caller, CreateParams())).record
    await services.builds.request(caller, BuildRequest(name="base", envd_version="0.9.1"))
    failed = await built(services, caller, on_base(run("exit 1")), name="base")
    assert (failed.state, failed.error_code) == ("error", "build_failed")
    again = (await services.creates.create(caller, CreateParams())).record
    assert (again.template_id, again.image) == (base.template_id, base.image)
    with pytest.raises(TemplateNotFound):
        await services.creates.create(caller, CreateParams(template="base:v1"))
    with pytest.raises(TemplateNotFound):
        await services.creates.create(caller, CreateParams(template=failed.template_id))
    own = await built(services, caller, on_base(run("write /own 1")), name="base")
    assert own.state == "ready", own.error
    record = (await services.creates.create(caller, CreateParams())).record
    assert (record.template_id, record.image) == (own.template_id, own.image)


async def test_logs_of_ended_builds_are_read_once(tmp_path: Path) -> None:
    logs = BuildLogs(tmp_path / "logs")
    for number in range(ENDED_IN_MEMORY_MAX + 2):
        logs.open(f"b{number}").write(f"line of {number}")
        logs.close(f"b{number}")
    again = BuildLogs(tmp_path / "logs")
    assert [entry.message for entry in await again.read("b0")] == ["line of 0"]
    (tmp_path / "logs" / "b0.log").unlink()
    assert [entry.message for entry in await again.read("b0")] == ["line of 0"]
    for number in range(1, ENDED_IN_MEMORY_MAX + 1):
        assert await again.read(f"b{number}")
    assert await again.read("b0") == [], "more logs than stated are in memory"
    again.remove("b1")
    assert await again.read("b1") == []
