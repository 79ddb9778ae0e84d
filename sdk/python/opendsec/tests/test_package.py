# SPDX-License-Identifier: Apache-2.0
"""The package as a whole: façade, generated code, import cost."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import opendsec

SDK = Path(__file__).resolve().parents[2]


def test_every_public_name_exists_and_is_documented() -> None:
    for name in opendsec.__all__:
        value = getattr(opendsec, name)
        if inspect.isclass(value):
            assert (value.__doc__ or "").strip(), name
    assert not set(opendsec.__all__) - set(dir(opendsec))


def test_both_halves_have_the_same_methods_with_the_same_arguments() -> None:
    for name in ("Client", "Sandbox", "Files", "Process", "Pty", "Watch", "FileStream"):
        sync, both = getattr(opendsec, name), getattr(opendsec, f"Async{name}")
        for method, function in inspect.getmembers(both, inspect.isfunction):
            if method.startswith("_"):
                continue
            twin = getattr(sync, "close" if method == "aclose" else method)
            assert list(inspect.signature(twin).parameters) == list(
                inspect.signature(function).parameters
            ), f"{name}.{method}"
            assert (function.__doc__ or "").strip(), f"{name}.{method}"


def test_sync_code_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, SDK / "scripts" / "generate_sync.py", "--check"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_is_cheap() -> None:
    code = (
        "import sys, opendsec; from opendsec.cli import main;"
        "from opendsec.cli._parser import build_parser; build_parser();"
        "heavy = {'httpx2', 'msgspec', 'rich', 'asyncio', 'ssl', 'typer'} & set(sys.modules);"
        "sys.exit(f'imported at start: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_sync_half_needs_no_event_loop() -> None:
    code = "import sys; from opendsec import Sandbox; sys.exit('asyncio' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_modules_stay_small() -> None:
    for path in (SDK / "opendsec").rglob("*.py"):
        lines = path.read_text().splitlines()
        assert len(lines) <= 650, path
        assert "SPDX-License-Identifier: Apache-2.0" in "\n".join(lines[:2]), path


def test_users_code_is_fully_typed(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    sample = tmp_path / "sample.py"
    sample.write_text(
        "from typing import assert_type\n"
        "import httpx2\n"
        "from opendsec import AsyncSandbox, CommandResult, FileInfo, Sandbox\n"
        "def sync(box: Sandbox) -> None:\n"
        "    assert_type(box.exec('x', on_stdout=print), CommandResult)\n"
        "    assert_type(box.files.list('/'), list[FileInfo])\n"
        "    assert_type(box.http(80), httpx2.Client)\n"
        "    for event in box.spawn(['x']):\n"
        "        assert_type(event.data, bytes)\n"
        "async def main(box: AsyncSandbox) -> None:\n"
        "    assert_type(await box.exec('x'), CommandResult)\n"
        "    assert_type(box.http(80), httpx2.AsyncClient)\n"
        "    async for event in await box.spawn(['x']):\n"
        "        assert_type(event.data, bytes)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", SDK / ".mypy_cache", sample],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
