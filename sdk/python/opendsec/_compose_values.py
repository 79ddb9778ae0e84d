# SPDX-License-Identifier: Apache-2.0
"""Variables of compose files: ``${NAME:-default}`` and files of ``NAME=value``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ._errors import InvalidRequest

_NAME_RE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
DEPTH_MAX = 16
VALUE_CHARS_MAX = 256 * 1024
_OPERATORS = (":-", ":?", ":+", "-", "?", "+")


def interpolate(text: str, values: Mapping[str, str], depth: int = 0) -> str:
    """A text with its variables replaced, as the compose specification says.

    ``$NAME``, ``${NAME}``; ``${NAME:-default}`` and ``${NAME-default}``, ``${NAME:?message}`` and
    ``${NAME?message}``, ``${NAME:+other}`` and ``${NAME+other}``, with variables in them;
    ``$$`` is a dollar sign. A variable that is not set is empty.

    Raises:
        ValueError: it is malformed, or a variable that must be set is not.
    """
    if depth > DEPTH_MAX:
        raise ValueError("variables in variables, too deep")
    if "$" not in text:
        return text
    out: list[str] = []
    at = 0
    while (dollar := text.find("$", at)) >= 0:
        out.append(text[at:dollar])
        after = text[dollar + 1 : dollar + 2]
        if after == "$":
            out.append("$")
            at = dollar + 2
        elif after == "{":
            end = _closing(text, dollar + 2)
            out.append(_replaced(text[dollar + 2 : end], values, depth))
            at = end + 1
        else:
            match = _NAME_RE.match(text, dollar + 1)
            if match is None:
                raise ValueError("a `$` that begins no variable; write `$$` for a dollar sign")
            out.append(values.get(match[0], ""))
            at = match.end()
    out.append(text[at:])
    found = "".join(out)
    if len(found) > VALUE_CHARS_MAX:
        raise ValueError(f"longer than {VALUE_CHARS_MAX} characters")
    return found


def _closing(text: str, start: int) -> int:
    """Where the brace ends that was opened before ``start``."""
    depth, at = 1, start
    while at < len(text):
        if text.startswith("${", at):
            depth, at = depth + 1, at + 2
            continue
        if text[at] == "}":
            depth -= 1
            if depth == 0:
                return at
        at += 1
    raise ValueError("`${` without `}`")


def _replaced(inner: str, values: Mapping[str, str], depth: int) -> str:
    match = _NAME_RE.match(inner)
    if match is None:
        raise ValueError(f"`${{{inner[:64]}}}` names no variable")
    name, rest = match[0], inner[match.end() :]
    value = values.get(name)
    if not rest:
        return value or ""
    operator = next((one for one in _OPERATORS if rest.startswith(one)), None)
    if operator is None:
        raise ValueError(f"`${{{inner[:64]}}}`: only `-`, `?` and `+` may follow the name")
    given = value is not None and (value != "" or not operator.startswith(":"))
    other = rest[len(operator) :]
    if operator[-1] == "+":
        return interpolate(other, values, depth + 1) if given else ""
    if given:
        return value or ""
    if operator[-1] == "-":
        return interpolate(other, values, depth + 1)
    message = interpolate(other, values, depth + 1)
    raise ValueError(f"the variable `{name}` is not set" + (f": {message}" if message else ""))


def read_env_file(path: Path) -> dict[str, str]:
    """Lines of ``NAME=value``; blank ones and those from ``#`` on do not count.

    Raises:
        InvalidRequest: it cannot be read, or a line is nothing of that.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidRequest(f"{path}: {exc}") from exc
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        name, equals, value = stripped.removeprefix("export ").partition("=")
        name = name.strip()
        if _NAME_RE.fullmatch(name) is None:
            raise InvalidRequest(f"{path}:{number}: not `NAME=value`")
        if equals:
            found[name] = _unquoted(value.strip())
    return found


def _unquoted(value: str) -> str:
    for quote in ("'", '"'):
        if len(value) >= 2 and value[0] == quote == value[-1]:
            return value[1:-1]
    return value.split(" #", 1)[0].rstrip()
