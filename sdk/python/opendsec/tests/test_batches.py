# SPDX-License-Identifier: Apache-2.0
"""Batches and bulk operations against a scripted server: what is sent, cuts, errors."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from opendsec import (
    BatchNotFound,
    ConnectionFailed,
    InvalidRequest,
    NodeUnavailable,
    QuotaExceeded,
    SandboxNotFound,
    _limits,
)
from opendsec._progress import ProgressBar

from .fake_server import Answer, FakeServer, error, sandbox
from .kits import Kit, collect, done

NAME = "b0123456789abcdefghi"
BATCH = {"batch_id": NAME, "project_id": "p", "state": "running", "asked": 3,
         "created_at": "2026-01-01T00:00:00Z"}  # fmt: skip
DONE = {**BATCH, "state": "done", "made": 2, "failed": 1, "finished_at": "2026-01-01T00:00:01Z"}
RESULTS = f"/v1/batches/{NAME}/results"
FULL = {"code": "quota_exceeded", "message": "full", "retryable": True, "fault": "capacity"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_limits, "RECONNECT_PAUSE_S", 0.01)


def text(*lines: Any) -> list[bytes]:
    return [json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines]


def item(index: int, seq: int) -> dict[str, Any]:
    return {"index": index, "seq": seq, "sandbox": sandbox(sandbox_id=f"itest{index:015d}")}


async def ask(client: Any, server: FakeServer, *answers: Answer, **options: Any) -> Any:
    server.on("POST", "/v1/batches", Answer(201, BATCH))
    server.on("GET", f"/v1/batches/{NAME}", Answer(200, DONE))
    server.on("GET", RESULTS, *answers)
    return await done(client.batches.create(**(options or {"count": 3})))


async def test_items_come_once_over_broken_connections(client: Any, server: FakeServer) -> None:
    batch = await ask(
        client,
        server,
        Answer(raw=text({"batch": BATCH}, item(1, 1))),
        Answer(raw=[*text({"batch": BATCH}), b'{"index":0,"se']),
        Answer(drop=True),
        Answer(503, error("node_unavailable", retryable=True, fault="platform")),
        Answer(raw=text({"batch": BATCH}, {}, {"index": 2, "seq": 2, "error": FULL})),
        Answer(raw=text({"batch": BATCH}, item(0, 3), {"done": {"asked": 3}})),
    )
    items = await done(batch.all())
    assert [one.index for one in items] == [0, 1, 2]
    assert items[0].unwrap().sandbox_id == "itest" + "0" * 15
    assert isinstance(items[2].error, QuotaExceeded) and items[2].error.retryable
    with pytest.raises(QuotaExceeded):
        items[2].unwrap()
    asked = [one.query["after"] for one in server.of("GET", RESULTS)]
    assert asked[0] == ["0"] and asked[-1] == ["2"]
    assert batch.info.done and batch.info.made == 2


async def test_what_cannot_get_better_is_raised(
    client: Any, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = await ask(client, server, Answer(404, error("batch_not_found")))
    with pytest.raises(BatchNotFound):
        await collect(batch)
    monkeypatch.setattr(_limits, "RECONNECT_S", 0.0)
    failed = {"failed": {"code": "node_unavailable", "message": "stopping", "retryable": True}}
    batch = await ask(client, server, Answer(raw=text(failed)))
    with pytest.raises(NodeUnavailable):
        await collect(batch)
    batch = await ask(client, server, Answer(raw=text({"batch": BATCH})))
    with pytest.raises(ConnectionFailed):
        await collect(batch)


async def test_what_is_asked_for(client: Any, server: FakeServer) -> None:
    await ask(
        client,
        server,
        Answer(200, {}),
        items=[{}, {"env": {"A": "2"}, "timeout_s": 1.5}],
        wait_s=9.2,
        idempotency_key="k",
        memory_mb=128,
        labels=("x",),
        cpu=None,
    )
    asked = server.of("POST", "/v1/batches")[0]
    assert asked.headers["idempotency-key"] == "k"
    assert asked.json == {
        "sandbox": {"memory_mb": 128, "labels": ["x"]},
        "items": [{}, {"env": {"A": "2"}, "timeout_s": 2}],
        "wait_s": 10,
    }
    with pytest.raises(InvalidRequest):
        await done(client.batches.create(1, colour="red"))
    with pytest.raises(InvalidRequest):
        await done(client.batches.get(""))


async def test_bulk(client: Any, server: FakeServer) -> None:
    result = {"exit_code": 3, "signal": None, "timed_out": False, "stdout": "a", "stderr": "",
              "stdout_cut": True, "stderr_cut": False, "took_s": 0.1}  # fmt: skip
    gone = {"code": "sandbox_not_found", "message": "gone", "retryable": False, "fault": "user"}
    answer = text(
        {"sandbox_id": "a", "result": result}, {}, {"sandbox_id": "b", "error": gone},
        {"done": {"selected": 2, "ok": 1, "failed": 1}},
    )  # fmt: skip
    server.on("POST", "/v1/sandboxes/bulk/exec", Answer(raw=answer))
    ran, lost = await collect(client.batches.exec("false", labels=["x"], output_bytes=1))
    assert (ran.result.exit_code, ran.result.stdout_cut, ran.ok) == (3, True, False)
    assert isinstance(lost.error, SandboxNotFound) and not lost.ok
    body = server.of("POST", "/v1/sandboxes/bulk/exec")[0].json
    assert body == {
        "select": {"labels": ["x"]}, "command": "false", "timeout_s": 60, "output_bytes": 1,
    }  # fmt: skip
    ended = text({"sandbox_id": "a", "state": "ended"}, {"done": {}})
    server.on("POST", "/v1/sandboxes/bulk/kill", Answer(raw=ended))
    assert [one.ok for one in await collect(client.batches.kill(ids=["a"]))] == [True]
    # A command whose answer broke off has run: it is not sent again.
    server.on("POST", "/v1/sandboxes/bulk/exec", Answer(raw=answer[:1]))
    before = len(server.of("POST", "/v1/sandboxes/bulk/exec"))
    with pytest.raises(ConnectionFailed):
        await collect(client.batches.exec("false", task_id="t"))
    assert len(server.of("POST", "/v1/sandboxes/bulk/exec")) == before + 1


async def test_list(client: Any, server: FakeServer) -> None:
    first = {"batches": [BATCH], "next_cursor": "c"}
    server.on("GET", "/v1/batches", Answer(200, first), Answer(200, {"batches": [DONE]}))
    assert [b.done for b in await collect(client.batches.list())] == [False, True]
    assert server.of("GET", "/v1/batches")[1].query["cursor"] == ["c"]


def test_a_bar_shows_how_far_it_is(kit: Kit) -> None:
    out = io.StringIO()
    bar = ProgressBar(10, out)
    bar.update(3, 0)
    bar.finish(8, 2)
    assert "10/10" in out.getvalue() and "2 failed" in out.getvalue()
    assert out.getvalue().endswith("\n")
