# SPDX-License-Identifier: AGPL-3.0-only
"""Errors on their way from a node: whose fault they are is not lost with their class."""

from __future__ import annotations

import msgspec
import pytest

from opendsec_server.contract import node_wire as wire
from opendsec_server.contract.errors import NodeFull, OpendsecError, SandboxStartFailed
from opendsec_server.node.start import StartCommandFailed, StartCommandTimeout


def of_one_machine() -> OpendsecError:
    error = SandboxStartFailed("its agent was killed", details={"oom_kills": 2})
    error.fault, error.retryable = "user", False
    return error


@pytest.mark.parametrize(
    "error",
    [
        StartCommandFailed("exit 7"),
        StartCommandTimeout("not ready within 3 s", details={"time_out_of": "start command"}),
        SandboxStartFailed("crun failed"),
        NodeFull("no disk", retry_after_s=3),
        of_one_machine(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_fault_and_evidence_arrive(error: OpendsecError) -> None:
    sent = wire.encode(wire.to_wire(error))
    there = wire.from_wire(msgspec.json.decode(sent, type=wire.WireError))
    assert there.to_dict() == error.to_dict()
    assert there.retry_after_s == error.retry_after_s


def test_a_node_of_an_older_release_says_no_fault() -> None:
    there = wire.from_wire(wire.WireError(kind="NodeFull", message="m", remediation="r"))
    assert (there.fault, there.retryable) == ("capacity", True)
