# SPDX-License-Identifier: Apache-2.0
"""Templates that people ask for first, as steps on top of ``base``."""

from __future__ import annotations

import msgspec

from ._models import BuildStep

_PYTHON = (
    "ipython", "matplotlib", "numpy", "pandas", "pillow", "pytest", "requests", "scikit-learn",
    "scipy", "sympy",
)  # fmt: skip


class ReadyMade(msgspec.Struct, kw_only=True, frozen=True):
    """How one of them is built.

    Attributes:
        description: One line for people.
        steps: On top of ``base``. The last one proves that what was asked for works.
        memory_mb: Memory of its sandboxes in MiB.
    """

    description: str
    steps: tuple[BuildStep, ...]
    memory_mb: int


def _run(*commands: str) -> BuildStep:
    return BuildStep(type="RUN", args=(" && ".join(commands), "root"))


READY_MADE: dict[str, ReadyMade] = {
    "python": ReadyMade(
        description="Python with " + ", ".join(_PYTHON),
        steps=(
            _run("pip install --no-cache-dir " + " ".join(_PYTHON)),
            _run("python3 -c 'import IPython, matplotlib, numpy, pandas, PIL, requests, scipy'"),
        ),
        memory_mb=2_048,
    ),
    "node": ReadyMade(
        description="Node.js with npm and TypeScript",
        steps=(
            _run(
                "apt-get update",
                "DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends npm",
                "rm -rf /var/lib/apt/lists/*",
            ),
            _run("npm install -g typescript", "npm cache clean --force"),
            _run("node --version", "npm --version", "tsc --version"),
        ),
        memory_mb=1_024,
    ),
}
"""By the name that the template gets."""
