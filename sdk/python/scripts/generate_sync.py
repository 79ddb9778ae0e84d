#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Derive ``opendsec/_sync`` from ``opendsec/_async``.

The async code is the source. The sync code is real source too, so that types, tracebacks and
Ctrl-C are those of ordinary sync code. ``_concurrency.py`` is written by hand on both sides.

Usage: ``generate_sync.py`` writes; ``generate_sync.py --check`` only compares (exit code 1 if
anything is out of date).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "opendsec"
SOURCE = PACKAGE / "_async"
TARGET = PACKAGE / "_sync"
BY_HAND = {"_concurrency.py", "__init__.py"}

HEADER = """\
# Generated from {source} by scripts/generate_sync.py. Do not edit.
# ruff: noqa: RUF100, SIM117, UP028
"""

RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\basync (def|with|for)\b", r"\1"),
        (r"\bawait ", ""),
        (r"\bwith (?=[A-Z]\w+\.create\(\))", "with "),
        (r"\bAsync(?=[A-Z])", ""),
        (r"\bStopAsyncIteration\b", "StopIteration"),
        (r"__a(enter|exit|iter|next)__", r"__\1__"),
        (r"\ba(close|read|iter_\w+)\(", r"\1("),
        (r"\banext\(", "next("),
        (r"\basynccontextmanager\b", "contextmanager"),
        (r"\b_async\b", "_sync"),
        # Callable[[], Awaitable[T]] of the async source is Callable[[], T] here.
        (r"\bAwaitable\[(\w+)\]", r"\1"),
        (r"^from collections\.abc import (.*)\bAwaitable, ", r"from collections.abc import \1"),
    ]
]


def derive(source: Path) -> str:
    """The sync text of one async module, formatted."""
    text = source.read_text()
    spdx, _, body = text.partition("\n")
    lines = []
    for line in body.splitlines():
        for pattern, replacement in RULES:
            line = pattern.sub(replacement, line)
        lines.append(line)
    header = HEADER.format(source=f"_async/{source.name}")
    return _ruff(f"{spdx}\n{header}" + "\n".join(lines) + "\n", source.name)


def _ruff(text: str, name: str) -> str:
    """Sort imports and format, as the repository's settings say."""
    path = str(TARGET / name)
    for arguments in (
        ["check", "--select", "I", "--fix-only", "--quiet", "--stdin-filename", path, "-"],
        ["format", "--quiet", "--stdin-filename", path, "-"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *arguments],
            input=text,
            text=True,
            capture_output=True,
            check=True,
        )
        text = done.stdout
    return text


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale: list[str] = []
    wanted: set[str] = set(BY_HAND)
    for source in sorted(SOURCE.glob("*.py")):
        if source.name in BY_HAND:
            continue
        wanted.add(source.name)
        target = TARGET / source.name
        text = derive(source)
        if not target.exists() or target.read_text() != text:
            stale.append(target.name)
            if not check:
                target.write_text(text)
    for extra in sorted(TARGET.glob("*.py")):
        if extra.name not in wanted:
            stale.append(extra.name)
            if not check:
                extra.unlink()
    for name in stale:
        print(f"{'out of date' if check else 'written'}: opendsec/_sync/{name}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
