# SPDX-License-Identifier: AGPL-3.0-only
"""E2B's published packages."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .kit import Bench

E2E = Path(__file__).parents[1] / "e2e"


def run(bench: Bench, command: list[str]) -> None:
    """A user's program, that prints its results as its last line."""
    server = bench.own_machine()
    if bench.client.server_info().default_backend != bench.backend:
        pytest.skip("E2B's calls cannot name a backend, and this one is not the server's default")
    done = subprocess.run(
        [*command, *(["full"] if bench.can.memory_snapshot else [])],
        env=server.client_environment,
        capture_output=True,
        text=True,
        timeout=280,
        cwd=E2E / "js",
        check=False,
    )
    assert done.stdout.strip(), f"no results; stderr:\n{done.stderr}\n{server.log_tail()}"
    assert json.loads(done.stdout.strip().splitlines()[-1])["failed"] == {}


def test_python_pauses_connects_forks_and_saves(bench: Bench) -> None:
    run(bench, [sys.executable, str(E2E / "programs" / "e2b_state_sync.py")])


def test_javascript_pauses_connects_forks_and_saves(bench: Bench) -> None:
    node = shutil.which("node")
    if node is None or not (E2E / "js" / "node_modules" / "e2b").exists():
        pytest.skip("node or the package e2b is missing: run tests/run")
    run(bench, [node, str(E2E / "js" / "state.mjs")])
