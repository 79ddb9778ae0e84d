# SPDX-License-Identifier: Apache-2.0
"""Pause, connect, fork and snapshot, as a user's asynchronous E2B program does them.

Prints one JSON line of results. An argument ``full`` says that forks and snapshots hold memory.
"""

import asyncio
import inspect
import json
import sys
import traceback
import uuid

import e2b
from e2b import AsyncSandbox, SandboxState

FULL = "full" in sys.argv[1:]
TAG = uuid.uuid4().hex[:8]
results = {"client": f"e2b {getattr(e2b, '__version__', '?')} async", "passed": [], "failed": {}}
DISK_ONLY = (
    {"mode": "filesystem"}
    if "mode" in inspect.signature(AsyncSandbox.pause).parameters
    else {"keep_memory": False}
)


async def pause_and_connect(sandbox):
    command = await sandbox.commands.run("sleep 500", background=True)
    await sandbox.files.write("kept.txt", "kept")
    assert await sandbox.pause() is True
    assert await sandbox.pause() is False
    assert (await sandbox.get_info()).state == SandboxState.PAUSED
    again = await AsyncSandbox.connect(sandbox.sandbox_id)
    assert await again.files.read("kept.txt") == "kept"
    assert command.pid in [process.pid for process in await again.commands.list()]


async def a_filesystem_pause(sandbox):
    assert await sandbox.pause(**DISK_ONLY) is True
    await sandbox.connect()
    assert await sandbox.files.read("kept.txt") == "kept"
    assert await sandbox.commands.list() == []


async def connects_at_once(sandbox):
    await sandbox.pause()
    found = await asyncio.gather(*(AsyncSandbox.connect(sandbox.sandbox_id) for _ in range(4)))
    answers = await asyncio.gather(*(one.commands.run("echo up") for one in found))
    assert [answer.stdout for answer in answers] == ["up\n"] * 4


async def automatic_resume(_sandbox):
    one = await AsyncSandbox.create(
        timeout=600, lifecycle={"on_timeout": "pause", "auto_resume": True}
    )
    await one.pause()
    answers = await asyncio.gather(*(one.commands.run(f"echo {n}") for n in range(4)))
    assert [answer.stdout for answer in answers] == [f"{n}\n" for n in range(4)]
    await one.kill()


async def fork(sandbox):
    await sandbox.files.write("then.txt", "then")
    command = await sandbox.commands.run("sleep 504", background=True)
    children = await sandbox.fork(count=3, timeout=300)
    assert all(isinstance(child, AsyncSandbox) for child in children), children
    texts = await asyncio.gather(*(child.files.read("then.txt") for child in children))
    assert texts == ["then"] * 3
    lists = await asyncio.gather(*(child.commands.list() for child in children))
    for found in lists:
        assert (command.pid in [process.pid for process in found]) == FULL
    await asyncio.gather(*(child.kill() for child in children))
    assert (await sandbox.commands.run("echo goes on")).stdout == "goes on\n"


async def snapshots(sandbox):
    snapshot = await sandbox.create_snapshot(name=f"a-{TAG}")
    child = await AsyncSandbox.create(snapshot.snapshot_id, timeout=300)
    assert await child.files.read("then.txt") == "then"
    listed = await AsyncSandbox.list_snapshots(sandbox_id=sandbox.sandbox_id).next_items()
    assert [found.snapshot_id for found in listed] == [snapshot.snapshot_id]
    assert await AsyncSandbox.delete_snapshot(snapshot.snapshot_id) is True
    assert await AsyncSandbox.delete_snapshot(snapshot.snapshot_id) is False
    await child.kill()


async def kill_of_a_paused_sandbox(sandbox):
    await sandbox.pause()
    assert await sandbox.kill() is True
    assert await AsyncSandbox.kill(sandbox.sandbox_id) is False


async def main():
    sandbox = await AsyncSandbox.create(timeout=600, metadata={"tag": TAG})
    for step in (
        pause_and_connect,
        a_filesystem_pause,
        connects_at_once,
        automatic_resume,
        fork,
        snapshots,
        kill_of_a_paused_sandbox,
    ):
        try:
            await step(sandbox)
            results["passed"].append(step.__name__)
        except Exception:
            results["failed"][step.__name__] = traceback.format_exc()
    print(json.dumps(results))
    sys.exit(bool(results["failed"]))


asyncio.run(main())
