# SPDX-License-Identifier: AGPL-3.0-only
"""Programs that the node runs in containers, and archives that it unpacks there."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from opendsec_server.contract.node import SandboxSpec

from .machine import CallError, NodeProcess

pytestmark = pytest.mark.node


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
