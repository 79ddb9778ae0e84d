# SPDX-License-Identifier: AGPL-3.0-only
"""The published E2B packages, unmodified, with three environment variables."""

from __future__ import annotations

import json

import pytest

from tests.harness import Server

from .tours import JS, PROGRAMS, node_with_package, python_of, run_tour


@pytest.mark.timeout(360)
@pytest.mark.parametrize("program", ["e2b_sync.py", "e2b_async.py"])
@pytest.mark.parametrize("release", ["2.63.0", "2.45.1"])
def test_python_package(server: Server, release: str, program: str) -> None:
    python = python_of(release)
    results = run_tour(server, [python, str(PROGRAMS / program)])
    assert results["failed"] == {}
    passed = results["passed"]
    assert isinstance(passed, list)
    assert len(passed) >= (24 if program == "e2b_sync.py" else 12)


@pytest.mark.timeout(360)
def test_javascript_package(server: Server) -> None:
    node = node_with_package()
    results = run_tour(server, [node, str(JS / "tour.mjs")])
    assert results["failed"] == {}
    passed = results["passed"]
    assert isinstance(passed, list)
    assert len(passed) >= 15


@pytest.mark.timeout(360)
@pytest.mark.parametrize("program", ["e2b_state_sync.py", "e2b_state_async.py"])
@pytest.mark.parametrize("release", ["2.63.0", "2.45.1"])
def test_python_package_pauses_forks_and_saves(server: Server, release: str, program: str) -> None:
    python = python_of(release)
    results = run_tour(server, [python, str(PROGRAMS / program)])
    assert results["failed"] == {}
    passed = results["passed"]
    assert isinstance(passed, list)
    assert len(passed) >= (18 if program == "e2b_state_sync.py" else 7)


@pytest.mark.timeout(360)
def test_javascript_package_pauses_forks_and_saves(server: Server) -> None:
    node = node_with_package()
    results = run_tour(server, [node, str(JS / "state.mjs")])
    assert results["failed"] == {}
    passed = results["passed"]
    assert isinstance(passed, list)
    assert len(passed) >= 9


def test_a_fork_of_a_container_says_that_it_holds_no_memory(server: Server) -> None:
    status, _, body = server.request("POST", "/v2/sandboxes", {"templateID": "base"})
    assert status == 201, body
    sandbox_id = json.loads(body)["sandboxID"]
    status, headers, body = server.request("POST", f"/sandboxes/{sandbox_id}/fork", {"count": 1})
    assert status == 201, body
    told = {name.lower(): value for name, value in headers.items()}
    assert told["x-opendsec-fork-mode"] == "filesystem"
    (item,) = json.loads(body)
    for name in (sandbox_id, item["sandbox"]["sandboxID"]):
        server.request("DELETE", f"/sandboxes/{name}")
