# SPDX-License-Identifier: AGPL-3.0-only
"""The published E2B packages, unmodified, with three environment variables."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import Server

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OLD_PYTHON = ROOT / ".venv-e2b-2.45" / "bin" / "python"
JS_PACKAGE = HERE / "js" / "node_modules" / "e2b"


def run_tour(server: Server, command: list[str]) -> dict[str, object]:
    """Run a program that prints its results as the last line of JSON."""
    run = subprocess.run(
        command,
        env=server.client_environment,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=HERE / "js",
        check=False,
    )
    assert run.stdout.strip(), f"no results; stderr:\n{run.stderr}\n{server.log_tail()}"
    return dict(json.loads(run.stdout.strip().splitlines()[-1]))


@pytest.mark.timeout(360)
@pytest.mark.parametrize("program", ["e2b_sync.py", "e2b_async.py"])
@pytest.mark.parametrize("release", ["2.63.0", "2.45.1"])
def test_python_package(server: Server, release: str, program: str) -> None:
    python = Path(sys.executable) if release == "2.63.0" else OLD_PYTHON
    if not python.exists():
        pytest.skip(f"{python} is missing: run scripts/dev-setup")
    results = run_tour(server, [str(python), str(HERE / "programs" / program)])
    assert results["failed"] == {}
    passed = results["passed"]
    assert isinstance(passed, list)
    assert len(passed) >= (24 if program == "e2b_sync.py" else 12)


@pytest.mark.timeout(360)
def test_javascript_package(server: Server) -> None:
    node = shutil.which("node")
    if node is None or not JS_PACKAGE.exists():
        pytest.skip("node or the package e2b is missing: run tests/run")
    results = run_tour(server, [node, str(HERE / "js" / "tour.mjs")])
    assert results["failed"] == {}
    passed = results["passed"]
    assert isinstance(passed, list)
    assert len(passed) >= 15


@pytest.mark.timeout(360)
@pytest.mark.parametrize("program", ["e2b_state_sync.py", "e2b_state_async.py"])
@pytest.mark.parametrize("release", ["2.63.0", "2.45.1"])
def test_python_package_pauses_forks_and_saves(server: Server, release: str, program: str) -> None:
    python = Path(sys.executable) if release == "2.63.0" else OLD_PYTHON
    if not python.exists():
        pytest.skip(f"{python} is missing: run scripts/dev-setup")
    results = run_tour(server, [str(python), str(HERE / "programs" / program)])
    assert results["failed"] == {}
    passed = results["passed"]
    assert isinstance(passed, list)
    assert len(passed) >= (18 if program == "e2b_state_sync.py" else 7)


@pytest.mark.timeout(360)
def test_javascript_package_pauses_forks_and_saves(server: Server) -> None:
    node = shutil.which("node")
    if node is None or not JS_PACKAGE.exists():
        pytest.skip("node or the package e2b is missing: run tests/run")
    results = run_tour(server, [node, str(HERE / "js" / "state.mjs")])
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
