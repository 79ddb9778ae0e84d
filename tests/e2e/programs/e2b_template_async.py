# SPDX-License-Identifier: AGPL-3.0-only
"""The same for the async half, shorter. Arguments: an image, and a directory for a context."""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from pathlib import Path

from e2b import AsyncSandbox, AsyncTemplate, BuildException, wait_for_file

IMAGE, CONTEXT = sys.argv[1], Path(sys.argv[2])


async def builds_and_starts() -> None:
    (CONTEXT / "c.txt").write_text("async\n")
    template = (
        AsyncTemplate(file_context_path=str(CONTEXT))
        .from_image(IMAGE)
        .copy("c.txt", "/srv/")
        .set_workdir("/srv")
        .set_user("root")
        .run_cmd("id -un > who")
        .set_start_cmd("touch /tmp/up && sleep 1000", wait_for_file("/tmp/up"))
    )
    await AsyncTemplate.build(template, "async-tour")
    assert await AsyncTemplate.exists("async-tour")
    sandbox = await AsyncSandbox.create("async-tour")
    try:
        assert await sandbox.files.read("/srv/c.txt") == "async\n"
        assert await sandbox.files.read("/srv/who") == "root\n"
        assert await sandbox.files.exists("/tmp/up")
    finally:
        await sandbox.kill()


async def several_at_once() -> None:
    template = AsyncTemplate().from_template("base").run_cmd("echo shared > ~/s; sleep 1")
    await asyncio.gather(*(AsyncTemplate.build(template, f"at-once-{n}") for n in range(3)))


async def failing_step_raises() -> None:
    try:
        await AsyncTemplate.build(AsyncTemplate().from_template("base").run_cmd("exit 3"), "bad-a")
    except BuildException as exc:
        assert "exited with code 3" in str(exc)
    else:
        raise AssertionError("it did not fail")


async def main() -> None:
    CONTEXT.mkdir(parents=True, exist_ok=True)
    passed, failed = [], {}
    for work in (builds_and_starts, several_at_once, failing_step_raises):
        try:
            await work()
            passed.append(work.__name__)
        except Exception:
            failed[work.__name__] = traceback.format_exc()[-2_000:]
    print(json.dumps({"passed": passed, "failed": failed}))


asyncio.run(main())
