# SPDX-License-Identifier: AGPL-3.0-only
"""E2B's code interpreter packages on the template that we make for them."""

from __future__ import annotations

import msgspec
import pytest

from opendsec import Client
from opendsec._ready_made import KERNELS, READY_MADE
from tests.harness import Server

from .tours import JS, PROGRAMS, node_with_package, python_of, run_tour

NAME = "code-interpreter-v1"


@pytest.fixture(scope="module")
def template(server: Server) -> str:
    """The template, without the hundreds of megabytes of packages that only user code needs."""
    recipe = READY_MADE[NAME]
    install, *others = recipe.steps
    small = [name for name in KERNELS if "charts" not in name and "matplotlib" not in name]
    packages = "pip install --no-cache-dir " + " ".join(small)
    with Client(base_url=server.url, api_key=server.api_key) as client:
        client.templates.build(
            NAME,
            from_template="base",
            context=recipe.files,
            steps=[msgspec.structs.replace(install, args=(packages, install.args[1])), *others],
            memory_mb=1_024,
            start_command=recipe.start_command,
            ready_command=recipe.ready_command,
        )
    return NAME


@pytest.mark.timeout(420)
def test_python_package(server: Server, template: str) -> None:
    results = run_tour(server, [python_of("2.63.0"), str(PROGRAMS / "code_interpreter.py")])
    assert not results["failed"], "\n".join(results["failed"].values())  # type: ignore[attr-defined]
    assert len(results["passed"]) == 10  # type: ignore[arg-type]


@pytest.mark.timeout(120)
def test_javascript_package(server: Server, template: str) -> None:
    node = node_with_package()
    results = run_tour(server, [node, str(JS / "interpreter.mjs")])
    assert not results["failed"], "\n".join(results["failed"].values())  # type: ignore[attr-defined]
    assert len(results["passed"]) == 3  # type: ignore[arg-type]
