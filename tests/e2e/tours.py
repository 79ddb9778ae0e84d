# SPDX-License-Identifier: AGPL-3.0-only
"""Programs written with the published packages of E2B, run against a server."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import Server

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
JS = HERE / "js"
RELEASE = "2.63.0"
"""Of the Python package that is installed beside ours; the other one has a place of its own."""
_OLD_PYTHON = HERE.parents[1] / ".venv-e2b-2.45" / "bin" / "python"


def python_of(release: str) -> str:
    """The interpreter that has a release of the Python package; skips without it."""
    python = Path(sys.executable) if release == RELEASE else _OLD_PYTHON
    if not python.exists():
        pytest.skip(f"{python} is missing: run scripts/dev-setup")
    return str(python)


def node_with_package() -> str:
    """Node.js, where the JavaScript package is installed; skips without it."""
    node = shutil.which("node")
    if node is None or not (JS / "node_modules" / "e2b").exists():
        pytest.skip("node or the package e2b is missing: run tests/run")
    return node


def run_tour(server: Server, command: list[str]) -> dict[str, object]:
    """Run a program that prints its results as the last line of JSON. Of one whose steps failed,
    what server and edge say of that time is printed, and whether they are still the same."""
    before = (server.daemon(), server.edge())
    run = subprocess.run(
        command,
        env=server.client_environment,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=JS,
        check=False,
    )
    assert run.stdout.strip(), f"no results; stderr:\n{run.stderr}\n{server.log_tail()}"
    results = dict(json.loads(run.stdout.strip().splitlines()[-1]))
    if results["failed"]:
        print(f"daemon and edge before: {before}, after: {(server.daemon(), server.edge())}")
        print(f"--- edge\n{server.edge_log_tail()}\n--- server\n{server.log_tail()}")
    return results
