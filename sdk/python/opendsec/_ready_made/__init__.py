# SPDX-License-Identifier: Apache-2.0
"""Templates that people ask for first, as steps on top of ``base``."""

from __future__ import annotations

from pathlib import Path

import msgspec

from opendsec._models import BuildStep

_PYTHON = (
    "ipython", "matplotlib", "numpy", "pandas", "pillow", "pytest", "requests", "scikit-learn",
    "scipy", "sympy",
)  # fmt: skip

KERNELS = (
    # e2b-charts reads figures of matplotlib before 3.11.
    "bash_kernel", "deno", "e2b-charts", "ipykernel", "jupyter-client", "'matplotlib<3.11'",
    "msgspec", "orjson", "starlette", "uvicorn",
)  # fmt: skip


class ReadyMade(msgspec.Struct, kw_only=True, frozen=True):
    """How one of them is built.

    Attributes:
        description: One line for people.
        steps: On top of ``base``. The last one proves that what was asked for works.
        memory_mb: Memory of its sandboxes in MiB.
        files: Directory that ``COPY`` steps copy from.
        start_command: Runs in each of its sandboxes.
        ready_command: Exits with 0 when that is up.
    """

    description: str
    steps: tuple[BuildStep, ...]
    memory_mb: int
    files: Path | None = None
    start_command: str | None = None
    ready_command: str | None = None


_INTERPRETER = "/opt/opendsec/code_interpreter"


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
    "code-interpreter-v1": ReadyMade(
        description="For E2B's code interpreter: Python, JavaScript, TypeScript, Bash",
        steps=(
            _run("pip install --no-cache-dir " + " ".join((*_PYTHON, *KERNELS))),
            # For every user, since code runs as root, and people log in as another.
            BuildStep(type="ENV", args=("JUPYTER_DATA_DIR", "/usr/local/share/jupyter")),
            _run("python3 -m bash_kernel.install --prefix /usr/local", "deno jupyter --install"),
            BuildStep(type="COPY", args=(".", _INTERPRETER, "root", "0755")),
            _run(
                f"cd {_INTERPRETER}/.. && python3 -c 'from code_interpreter.app import build_app'"
            ),
        ),
        memory_mb=2_048,
        files=Path(__file__).parent / "code_interpreter",
        # As root, like theirs: code installs packages and writes anywhere.
        start_command=(
            f"cd {_INTERPRETER}/.. && exec sudo -E HOME=/root python3 -m code_interpreter"
        ),
        ready_command=(
            "python3 -c \"import urllib.request as u; u.urlopen('http://127.0.0.1:49999/health')\""
        ),
    ),
}
"""By the name that the template gets."""
