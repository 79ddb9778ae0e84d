# SPDX-License-Identifier: Apache-2.0
"""What differs between the languages that code can be in."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

_STARTUP = Path(__file__).with_name("python_startup.py")


class Language(msgspec.Struct, kw_only=True, frozen=True):
    """One of them."""

    name: str
    kernel: str
    """The name of its Jupyter kernel."""
    set_env: Callable[[Mapping[str, str | None]], str]
    """Code that sets variables of the environment. None: takes one away."""
    arguments: tuple[str, ...] = ()
    """More arguments for the kernel's program."""
    barrier: str | None = None
    """Code that does nothing, for a kernel that says it is done before it has told the result:
    when this is begun, all was told."""
    transport: str = "ipc"
    """How it is talked to: by sockets in the file system, or ``tcp`` where it cannot."""


def _set_python(env: Mapping[str, str | None]) -> str:
    lines = ["import os as _os"]
    for key, value in env.items():
        if value is None:
            lines.append(f"_os.environ.pop({key!r}, None)")
        else:
            lines.append(f"_os.environ[{key!r}] = {value!r}")
    return "\n".join([*lines, "del _os"])


def _set_javascript(env: Mapping[str, str | None]) -> str:
    lines = []
    for key, value in env.items():
        if value is None:
            lines.append(f"Deno.env.delete({json.dumps(key)});")
        else:
            lines.append(f"Deno.env.set({json.dumps(key)}, {json.dumps(value)});")
    return "\n".join(lines)


def _set_bash(env: Mapping[str, str | None]) -> str:
    lines = []
    for key, value in env.items():
        if not key.isidentifier():
            # A shell cannot have it; its programs would not see it either.
            continue
        lines.append(f"unset {key}" if value is None else f"export {key}={shlex.quote(value)}")
    return "\n".join(lines) or ":"


LANGUAGES = {
    language.name: language
    for language in (
        Language(
            name="python",
            kernel="python3",
            set_env=_set_python,
            arguments=(
                "--InteractiveShell.colors=NoColor",
                f"--InteractiveShellApp.exec_files={_STARTUP}",
            ),
        ),
        *(
            Language(
                name=name, kernel="deno", set_env=_set_javascript, barrier="0", transport="tcp"
            )
            for name in ("javascript", "typescript")
        ),
        Language(name="bash", kernel="bash", set_env=_set_bash),
    )
}

_ALIASES = {
    "py": "python", "python3": "python", "js": "javascript", "node": "javascript",
    "ts": "typescript", "sh": "bash", "shell": "bash",
}  # fmt: skip


def find(name: str | None) -> Language:
    """The language of that name or nickname; Python if there is no name.

    Raises:
        LookupError: there is none. The message says which there are.
    """
    wanted = (name or "python").strip().lower()
    language = LANGUAGES.get(_ALIASES.get(wanted, wanted))
    if language is None:
        raise LookupError(f"language {name!r} is not known; there are: {', '.join(LANGUAGES)}")
    return language
