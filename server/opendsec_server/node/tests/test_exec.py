# SPDX-License-Identifier: AGPL-3.0-only
"""Programs that the node runs in containers, and archives that it unpacks there."""

from __future__ import annotations

import asyncio
import base64
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from opendsec_server.contract.node import SandboxSpec
from opendsec_server.node.exec import exec_events

from .machine import CallError, NodeProcess

pytestmark = pytest.mark.node

BUFFERS_BYTES_MAX = 64 * 1024 * 1024
"""Far above what kernels let a socket grow to by themselves (``tcp_rmem``, ``tcp_wmem``)."""


async def run(node: NodeProcess, spec: SandboxSpec, *argv: str, **options: Any) -> dict[str, Any]:
    """All output, and the end."""
    options.setdefault("timeout_s", 30)
    events = await node.call("exec", spec.sandbox_id, argv, **options)
    ends = [event for event in events if event["kind"] == "end"]
    assert len(ends) == 1 and events[-1] is ends[0]
    result = {"stdout": b"", "stderr": b"", **ends[0]}
    for event in events[:-1]:
        result[event["kind"]] += base64.b64decode(event["data"])
    return result


async def test_programs_and_their_ends(node: NodeProcess) -> None:
    spec = await node.create(env={"FROM": "sandbox"})

    async def sh(script: str, **options: Any) -> dict[str, Any]:
        return await run(node, spec, "/bin/sh", "-c", script, **options)

    done = await sh("echo out; echo err >&2; exit 3")
    assert (done["stdout"], done["stderr"], done["exit_code"]) == (b"out\n", b"err\n", 3)
    done = await sh("echo $FROM $MORE; pwd; id -un", env={"MORE": "x"}, workdir="/tmp", user="root")
    assert done["stdout"] == b"sandbox x\n/tmp\nroot\n"
    assert (await sh("id -un; pwd"))["stdout"] == b"user\n/home/user\n"
    done = await sh("kill -TERM $$")
    assert (done["exit_code"], done["signal"], done["timed_out"]) == (None, 15, False)
    done = await sh("head -c 3000000 /dev/zero")
    assert len(done["stdout"]) == 3_000_000
    for argv, options in [
        (("/no/such",), {}),
        (("true",), {"user": "nobody-here"}),
        (("true",), {"workdir": "/no/such"}),
        ((), {}),
    ]:
        with pytest.raises(CallError) as error:
            await run(node, spec, *argv, **options)
        assert error.value.code == "invalid_request", argv


async def test_the_whole_tree_dies_at_the_time_out(node: NodeProcess) -> None:
    spec = await node.create()
    script = "setsid sleep 987 & sleep 986 & echo began; wait"
    done = await run(node, spec, "/bin/sh", "-c", script, timeout_s=1)
    assert done["stdout"] == b"began\n"
    assert (done["exit_code"], done["timed_out"]) == (None, True)
    left = await run(node, spec, "pgrep", "-f", "sleep 98")
    assert left["exit_code"] == 1


async def test_a_slow_reader_holds_the_program_back(node: NodeProcess) -> None:
    spec = await node.create()
    route = await node.call("route", spec.sandbox_id)
    events = exec_events(route["address"], spec, ("yes",), timeout_s=60)
    assert (await anext(events)).data.startswith(b"y\ny\n")
    written = "sed -n 's/^wchar: //p' /proc/$(pgrep -x yes)/io"
    # The buffers on the way fill up, however long that takes; then it stands still.
    readings = [-2, -1]
    while readings[-1] != readings[-2] and len(readings) < 30:
        await asyncio.sleep(1)
        readings.append(int((await node.exec(spec, written))[1]))
    assert readings[-1] == readings[-2], readings
    assert readings[-1] < BUFFERS_BYTES_MAX, readings
    for _ in range(100):
        await anext(events)
    await events.aclose()


async def test_archives(node: NodeProcess, tmp_path: Path) -> None:
    spec = await node.create()
    archive = tmp_path / "files.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, text in (("src/a", "a"), ("src/sub/b", "b"), ("other", "o")):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(text), 0o600
            tar.addfile(info, io.BytesIO(text.encode()))

    async def unpack(
        *sources: str, target: str, user: str = "user", mode: int | None = None
    ) -> None:
        options = {"sources": sources, "target": target, "user": user, "mode": mode}
        await node.call("unpack", spec.sandbox_id, str(archive), **options)

    await unpack("src", target="/opt/copied/")
    await unpack("other", target="/opt/named", user="root", mode=0o755)
    await unpack("src/*", "oth[e-f]r", target="/opt/many")
    many = await node.exec(spec, "cd /opt/many; cat a b other", "root")
    assert many[1] == "abo", many
    seen = await node.exec(
        spec, "cd /opt; find copied -type f | sort; stat -c '%U %a' named", "root"
    )
    assert "b" in seen[1] and "root 755" in seen[1], seen
    for source, target, user in (
        ("missing", "/x", "user"),
        ("src/*.py", "/x", "user"),
        ("src", "/x", "no-such-user"),
        ("src", "relative", "user"),
    ):
        with pytest.raises(CallError) as error:
            await unpack(source, target=target, user=user)
        assert error.value.code == "invalid_request", (source, target, user)
        assert "{" not in str(error.value), "the agent's words, not its JSON"
    archive.write_bytes(b"no archive" * 1000)
    with pytest.raises(CallError) as error:
        await unpack("src", target="/x")
    assert error.value.code == "invalid_request"
    archive.write_bytes(b"no archive" * 1_000_000)
    with pytest.raises(CallError) as error:
        await unpack("src", target="/x")
    assert error.value.code == "invalid_request"
    archive.unlink()
    with pytest.raises(CallError) as error:
        await unpack("src", target="/x")
    assert error.value.code == "invalid_request"


async def test_no_room_for_an_archive(node: NodeProcess, tmp_path: Path) -> None:
    spec = await node.create(disk_mb=64)
    archive = tmp_path / "big.tar"
    with tarfile.open(archive, "w") as tar:
        info = tarfile.TarInfo("big")
        info.size = 200 << 20
        with (tmp_path / "big").open("w+b") as file:
            file.truncate(info.size)
            tar.addfile(info, file)
    with pytest.raises(CallError) as error:
        await node.call(
            "unpack", spec.sandbox_id, str(archive), sources=["big"], target="/big", user="root",
            mode=None,
        )  # fmt: skip
    assert error.value.code == "node_full"
    assert (await run(node, spec, "echo", "lives"))["stdout"] == b"lives\n"


async def test_the_sandbox_goes_away(node: NodeProcess) -> None:
    spec = await node.create()
    await node.call("pause", spec.sandbox_id)
    with pytest.raises(CallError) as error:
        await run(node, spec, "true")
    assert error.value.code == "sandbox_state_conflict"
    await node.call("kill", spec.sandbox_id)
    with pytest.raises(CallError) as error:
        await run(node, spec, "true")
    assert error.value.code == "sandbox_not_found"
