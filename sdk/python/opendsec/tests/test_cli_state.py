# SPDX-License-Identifier: Apache-2.0
"""The command line's words for pause, resume, fork, snapshots, and for what goes wrong."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator

import pytest

from opendsec import _errors
from opendsec.cli import _doctor
from opendsec.cli._output import REMEDIES
from opendsec.cli._parser import build_parser

from .fake_server import SANDBOX_ID, Answer, FakeServer, end, error, sandbox
from .test_cli import START, cli
from .test_state import FIGURES, ONE, PAUSED, snapshot
from .test_streams import GONE, exited, output, started, stream


@pytest.fixture
def ready(server: FakeServer) -> FakeServer:
    """A server with one running sandbox."""
    server.on("POST", "/v1/sandboxes", Answer(201, sandbox()))
    server.on("GET", ONE, Answer(200, sandbox()))
    server.on("DELETE", ONE, Answer(200, sandbox(state="ended")))
    server.on("POST", START, stream(started(), output("stdout", b"42\n"), exited(), end()))
    return server


def test_pause_and_resume(ready: FakeServer) -> None:
    ready.on("POST", f"{ONE}/pause", Answer(200, {**PAUSED, "pause": FIGURES}))
    plain = cli(ready, "pause", SANDBOX_ID)
    assert plain.stdout.decode().split() == [SANDBOX_ID]
    report = json.loads(cli(ready, "pause", "--mode", "filesystem", SANDBOX_ID, "--json").stdout)
    assert report["memory_freed_bytes"] == 200
    assert report["sandbox"]["state"] == "paused"
    assert "pause" not in report["sandbox"]
    assert [a.json["mode"] for a in ready.of("POST", f"{ONE}/pause")] == ["full", "filesystem"]
    ready.on("POST", f"{ONE}/pause", Answer(409, error("already_paused")))
    again = cli(ready, "pause", SANDBOX_ID)
    assert again.returncode == 1
    assert b"opendsec resume ID" in again.stderr
    ready.on("POST", f"{ONE}/resume", Answer(200, sandbox()))
    assert cli(ready, "resume", "--timeout", "5m", "--reboot", SANDBOX_ID).returncode == 0
    assert ready.of("POST", f"{ONE}/resume")[0].json == {"reboot": True, "timeout_s": 300}


def test_fork_prints_children_and_errors(ready: FakeServer) -> None:
    failed = error("node_full", fault="capacity", retryable=True)["error"]
    items = [{"sandbox": sandbox("i2")}, {"error": failed}, {"sandbox": sandbox("i3")}]
    ready.on("POST", f"{ONE}/fork", Answer(201, {"items": items}))
    done = cli(ready, "fork", SANDBOX_ID, "-n", "3", "--mode", "filesystem")
    assert done.returncode == 75
    assert done.stdout.decode().split() == ["i2", "i3"]
    assert b"node_full" in done.stderr
    assert ready.of("POST", f"{ONE}/fork")[0].json == {"count": 3, "mode": "filesystem"}
    as_json = json.loads(cli(ready, "fork", SANDBOX_ID, "-n", "3", "--json").stdout)
    assert [next(iter(item)) for item in as_json] == ["sandbox", "error", "sandbox"]


def test_snapshots(ready: FakeServer) -> None:
    ready.on("POST", f"{ONE}/snapshots", Answer(201, snapshot()))
    made = cli(ready, "snapshot", "create", SANDBOX_ID, "--name", "warm:v1")
    assert made.stdout.decode().split() == ["s1"]
    assert ready.of("POST", f"{ONE}/snapshots")[0].json == {"mode": "full", "name": "warm:v1"}
    page = {"snapshots": [snapshot()], "next_cursor": None}
    ready.on("GET", "/v1/snapshots", Answer(200, page))
    lines = cli(ready, "snapshot", "ls", "--sandbox", SANDBOX_ID).stdout.decode().splitlines()
    columns = "ID NAME BACKEND MODE DISK MEMORY AGE SOURCE"
    assert " ".join(lines[0].split()) == columns
    assert "warm:v1" in lines[1]
    assert json.loads(cli(ready, "snapshot", "ls", "--json").stdout)[0]["id"] == "s1"
    ready.on("DELETE", "/v1/snapshots/s1", Answer(204))
    ready.on("DELETE", "/v1/snapshots/s2", Answer(404, error("snapshot_not_found")))
    removed = cli(ready, "snapshot", "rm", "s2", "s1")
    assert (removed.returncode, removed.stdout.decode().split()) == (1, ["s1"])
    assert b"There is no snapshot s2" in removed.stderr
    assert b"opendsec snapshot ls" in removed.stderr
    assert cli(ready, "snapshot").returncode == 2


def test_create_asks_for_it(ready: FakeServer) -> None:
    options = ["--backend", "vm", "--from-snapshot", "warm:v1", "--on-timeout", "pause"]
    assert cli(ready, "create", *options, "--auto-resume").returncode == 0
    body = ready.of("POST", "/v1/sandboxes")[0].json
    assert (body["backend"], body["template"]) == ("vm", "warm:v1")
    assert (body["on_timeout"], body["auto_resume"]) == ("pause", True)
    both = cli(ready, "create", "--from-snapshot", "a", "--template", "b")
    assert both.returncode == 2
    ran = cli(ready, "run", "--from-snapshot", "warm:v1", "--", "true")
    assert ran.returncode == 0
    assert ready.of("POST", "/v1/sandboxes")[1].json["template"] == "warm:v1"


def test_ls_has_reasons_in_a_column_of_their_own(ready: FakeServer) -> None:
    alive = {"sandboxes": [sandbox(backend="vm"), PAUSED], "next_cursor": None}
    ready.on("GET", "/v1/sandboxes", Answer(200, alive))
    lines = cli(ready, "ls").stdout.decode().splitlines()
    assert lines[0].split()[:4] == ["ID", "STATE", "BACKEND", "TEMPLATE"]
    assert "REASON" not in lines[0]
    assert lines[1].split()[1:3] == ["running", "vm"]
    assert lines[2].split()[1] == "paused"
    ended = sandbox(state="ended", end_reason="timeout")
    ready.on("GET", "/v1/sandboxes", Answer(200, {"sandboxes": [ended], "next_cursor": None}))
    header, row = cli(ready, "ls", "-a").stdout.decode().splitlines()
    at = header.index("REASON")
    assert row[at:].split()[0] == "timeout"
    assert row[header.index("LEFT") : at].strip() == "-"


def test_columns_of_metrics_differ(ready: FakeServer) -> None:
    ready.on("GET", f"{ONE}/metrics", Answer(200, {"samples": [{"at": "2026-12-01T10:00:00Z"}]}))
    header = cli(ready, "metrics", SANDBOX_ID).stdout.decode().splitlines()[0]
    columns = [column.strip() for column in header.split("  ") if column.strip()]
    assert len(columns) == len(set(columns)) == 8, columns


def test_info_of_the_server_can_be_read(ready: FakeServer) -> None:
    info = {
        "version": "0.2.0",
        "domain": "localhost:7300",
        "envd_version": "0.9.1",
        "features": {"metrics": True, "volumes": False},
        "default_backend": "container",
        "node": {
            "node_id": "n1",
            "hostname": "host",
            "cpu_count": 2,
            "memory_total_bytes": 2**33,
            "disk_free_bytes": 2**30,
            "disk_total_bytes": 2**31,
            "sandboxes": 1,
            "sandboxes_max": 9,
            "features": {"cgroup": "v2"},
        },
        "backends": [
            {"name": "container", "capabilities": {"fork": True}},
            {
                "name": "vm",
                "accelerator": "tcg",
                "vmm": "qemu 7.2",
                "capabilities": {"own_kernel": True, "memory_snapshot": True},
            },
        ],
    }
    ready.on("GET", "/v1/info", Answer(200, info))
    text = cli(ready, "info").stdout.decode()
    assert max(len(line) for line in text.splitlines()) <= 100, text
    assert "1.0 GiB free of 2.0 GiB" in text
    assert "1 of 9" in text
    lines = text.splitlines()
    row = next(line for line in lines if line.startswith("vm "))
    assert row.split()[1:5] == ["-", "tcg", "qemu", "7.2"]
    assert "own kernel, memory snapshot" in row
    assert next(line for line in lines if line.startswith("container")).split()[1] == "yes"
    assert json.loads(cli(ready, "info", "--json").stdout)["backends"][1]["vmm"] == "qemu 7.2"


# --- paused sandboxes ----------------------------------------------------------------


def test_looking_does_not_wake(ready: FakeServer) -> None:
    ready.on("GET", ONE, Answer(200, PAUSED))
    ready.on("POST", "/process.Process/List", GONE)
    assert cli(ready, "url", SANDBOX_ID, "80").returncode == 0
    listed = cli(ready, "ps", SANDBOX_ID)
    assert listed.returncode == 1
    assert b"is paused" in listed.stderr
    assert b"opendsec resume ID" in listed.stderr
    waking = [a for a in ready.asked if a.path.endswith(("/connect", "/resume"))]
    assert not waking


def test_working_in_it_wakes(ready: FakeServer) -> None:
    ready.on("GET", ONE, Answer(200, PAUSED))
    ready.on("POST", f"{ONE}/resume", Answer(200, sandbox()))
    done = cli(ready, "exec", SANDBOX_ID, "--", "true")
    assert (done.returncode, done.stdout) == (0, b"42\n")
    assert len(ready.of("POST", f"{ONE}/resume")) == 1


def test_program_whose_sandbox_is_paused_has_no_exit_code(ready: FakeServer) -> None:
    cut = end({"code": "unavailable", "message": "the sandbox has ended or was paused"})
    ready.on("POST", START, stream(started(), output("stdout", b"half"), cut))
    ready.on("GET", "/health", GONE)
    ready.on("GET", ONE, Answer(200, sandbox()), Answer(200, PAUSED))
    done = cli(ready, "exec", SANDBOX_ID, "--", "true")
    assert (done.returncode, done.stdout) == (125, b"half")
    assert b"sandbox_paused" in done.stderr


# --- programs that cannot be started -------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(2, 127), (13, 126)])
def test_codes_of_shells_for_programs_that_cannot_run(
    ready: FakeServer, number: int, code: int
) -> None:
    refused = {"code": "invalid_argument", "message": f"cannot run 'foo': no (os error {number})"}
    ready.on("POST", START, stream(end(refused)))
    for line in (["exec", SANDBOX_ID, "--", "foo"], ["run", "--", "foo"]):
        done = cli(ready, *line)
        assert done.returncode == code
        assert b"cannot run 'foo'" in done.stderr
        assert b"Correct the request" not in done.stderr


# --- words ---------------------------------------------------------------------------


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from parsers(inner)


def test_every_option_has_help() -> None:
    silent = [
        f"{parser.prog} {action.dest}"
        for parser in parsers(build_parser())
        for action in parser._actions
        if not action.help and not isinstance(action, argparse._SubParsersAction)
    ]
    assert silent == []


def test_remedies_are_words_of_the_command_line() -> None:
    known = {cls.code for cls in _errors.all_error_classes()}
    assert set(REMEDIES) <= known
    for code, text in REMEDIES.items():
        assert "=" not in text, (code, text)
        assert "()" not in text, (code, text)


def test_remedy_of_the_server_is_translated_and_one_made_for_the_case_is_kept(
    ready: FakeServer,
) -> None:
    ready.on("GET", ONE, Answer(401, error("unauthenticated", remediation="Send X-API-Key.")))
    refused = cli(ready, "info", SANDBOX_ID).stderr.decode()
    assert "X-API-Key" not in refused
    assert "OPENDSEC_API_KEY" in refused
    special = error("not_supported", remediation="Ask for mode `filesystem`: it keeps the disk.")
    ready.on("POST", f"{ONE}/fork", Answer(501, special))
    assert "Give --mode filesystem: it keeps" in cli(ready, "fork", SANDBOX_ID).stderr.decode()


# --- doctor --------------------------------------------------------------------------


def test_doctor_without_root_skips_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_doctor, "_find_daemon", lambda: "/usr/bin/opendsecd")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (check,) = _doctor._machine_checks()
    assert (check.status, check.remedy) == ("skip", "sudo opendsec doctor")
    assert "root" in check.detail


IMAGE = {
    "digest": "sha256:" + "a" * 64,
    "names": ["mine:latest"],
    "layers": ["b" * 64],
    "config": {},
}


def test_pack(ready: FakeServer) -> None:
    ready.on("POST", f"{ONE}/pack", Answer(201, IMAGE))
    plain = cli(ready, "pack", SANDBOX_ID)
    assert plain.stdout.decode().split() == [IMAGE["digest"]]
    options = ("--name", "mine", "--squash", "--no-scrub", "--json")
    told = json.loads(cli(ready, "pack", *options, SANDBOX_ID).stdout)
    assert (told["digest"], told["names"]) == (IMAGE["digest"], ["mine:latest"])
    assert [a.json for a in ready.of("POST", f"{ONE}/pack")] == [
        {"squash": False, "scrub": True},
        {"squash": True, "scrub": False, "name": "mine"},
    ]
    ready.on("POST", f"{ONE}/pack", Answer(501, error("not_supported")))
    assert cli(ready, "pack", SANDBOX_ID).returncode == 1


def test_create_from_an_image(ready: FakeServer) -> None:
    done = cli(ready, "run", "--image", "alpine", "--layer", "a", "--layer", "b", "--", "true")
    assert done.returncode == 0, done.stderr
    for text in ("8080", "http://localhost/x", "test -e /up"):
        assert (
            cli(ready, "create", "--image", "alpine", "--start-image", "--ready", text).returncode
            == 0
        )
    bodies = [a.json for a in ready.of("POST", "/v1/sandboxes")]
    assert (bodies[0]["image"], bodies[0]["layers"]) == ("alpine", ["a", "b"])
    assert "start_image" not in bodies[0]
    assert all(body["start_image"] for body in bodies[1:])
    assert [body["ready"] for body in bodies[1:]] == [
        {"port": 8080},
        {"url": "http://localhost/x"},
        {"command": "test -e /up"},
    ]
    assert cli(ready, "create", "--image", "alpine", "--template", "x").returncode == 2
