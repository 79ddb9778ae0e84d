# SPDX-License-Identifier: Apache-2.0
"""``opendsec batch``: what is asked for, what is printed, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .fake_server import Answer, FakeServer
from .test_batches import BATCH, DONE, FULL, NAME, RESULTS, item, text
from .test_cli import cli

KILL = "/v1/sandboxes/bulk/kill"
EXEC = "/v1/sandboxes/bulk/exec"


def ready(server: FakeServer) -> None:
    lines = text({"batch": BATCH}, item(0, 1), {"index": 1, "seq": 2, "error": FULL}, item(2, 3),
                 {"done": {"asked": 3}})  # fmt: skip
    server.on("POST", "/v1/batches", Answer(201, BATCH))
    server.on("GET", f"/v1/batches/{NAME}", Answer(200, DONE))
    server.on("POST", f"/v1/batches/{NAME}/cancel", Answer(200, DONE))
    server.on("GET", RESULTS, Answer(raw=lines))


def test_create_prints_ids_and_tells_of_errors(server: FakeServer, tmp_path: Path) -> None:
    ready(server)
    made = cli(server, "batch", "create", "3", "--memory", "128", "--idempotency-key", "k")
    assert made.stdout.decode().split() == [f"itest{index:015d}" for index in (0, 2)]
    assert made.returncode == 75 and b"1 of 3 were not made" in made.stderr
    asked = server.of("POST", "/v1/batches")[0]
    assert asked.headers["idempotency-key"] == "k"
    assert asked.json["count"] == 3 and asked.json["sandbox"]["memory_mb"] == 128
    own = tmp_path / "items"
    own.write_text('{"env": {"SEED": "1"}}\n\n{"memory_mb": 64}\n')
    as_json = cli(server, "batch", "create", "--items", str(own), "--json")
    lines = [json.loads(line) for line in as_json.stdout.splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2]
    assert lines[1]["error"]["code"] == "quota_exceeded"
    items = server.of("POST", "/v1/batches")[1].json["items"]
    assert items == [{"env": {"SEED": "1"}}, {"memory_mb": 64}]
    detached = cli(server, "batch", "create", "3", "--detach")
    assert detached.stdout.decode().split() == [NAME] and detached.returncode == 0


def test_what_makes_no_sense_is_refused_here(server: FakeServer, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_text("{}\n[1]\n")
    wrong: tuple[tuple[str, ...], ...] = (
        ("create",),
        ("create", "3", "--items", str(bad)),
        ("create", "--items", str(bad)),
        ("create", "--items", str(tmp_path / "none")),
        ("exec", "--task", "t"),
    )
    for arguments in wrong:
        done = cli(server, "batch", *arguments)
        assert done.returncode == 1 and done.stderr and not done.stdout, arguments
    assert not server.asked


def test_status_watch_and_cancel(server: FakeServer) -> None:
    ready(server)
    server.on("GET", "/v1/batches", Answer(200, {"batches": [DONE]}))
    assert cli(server, "batch", "ls", "-q").stdout.decode().split() == [NAME]
    row = cli(server, "batch", "status", NAME).stdout.decode().splitlines()[1].split()
    assert row[:5] == [NAME, "done", "3", "2", "1"]
    assert cli(server, "batch", "watch", NAME, "--after", "1").returncode == 75
    assert server.of("GET", RESULTS)[0].query["after"] == ["1"]
    assert cli(server, "batch", "cancel", NAME).stdout.decode().split() == [NAME]


def test_one_thing_to_many(server: FakeServer) -> None:
    result: dict[str, Any] = {"exit_code": 3, "stdout": "a\nb\n", "stderr": "c", "stdout_cut": True}
    lines = text({"sandbox_id": "i1", "result": result}, {"done": {}})
    server.on("POST", EXEC, Answer(raw=lines))
    ran = cli(server, "batch", "exec", "--label", "x", "--", "sh", "-c", "echo 'a b'")
    assert ran.returncode == 1
    assert ran.stdout.decode().splitlines() == ["i1: a", "i1: b"]
    assert b"i1: c" in ran.stderr and b"exit code 3" in ran.stderr and b"more output" in ran.stderr
    body = server.of("POST", EXEC)[0].json
    assert body["command"] == "sh -c 'echo '\"'\"'a b'\"'\"''"
    assert body["select"] == {"labels": ["x"]}
    gone = {"code": "node_unavailable", "message": "away", "fault": "platform", "retryable": True}
    lines = text({"sandbox_id": "i1", "state": "ended"}, {"sandbox_id": "i2", "error": gone},
                 {"done": {}})  # fmt: skip
    server.on("POST", KILL, Answer(raw=lines))
    killed = cli(server, "batch", "kill", "--id", "i1", "--id", "i2")
    assert (killed.returncode, killed.stdout.decode().split()) == (70, ["i1"])
    assert b"i2: away" in killed.stderr
    assert server.of("POST", KILL)[0].json == {"select": {"ids": ["i1", "i2"]}}
