# SPDX-License-Identifier: AGPL-3.0-only
"""Words of a Dockerfile: quotes, and variables in them.

https://docs.docker.com/reference/dockerfile/#environment-replacement
"""

from __future__ import annotations

from collections.abc import Mapping

from opendsec_server.contract.limits import BUILD_ARG_CHARS_MAX

DEPTH_MAX = 32
"""Braces in each other."""
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class BadWord(ValueError):
    """A quote or brace is not closed, or it is too long or too deep."""


def expand(text: str, variables: Mapping[str, str], *, quotes: bool = True, depth: int = 0) -> str:
    """A word without its quotes, and with the variables' values.

    Args:
        text: ``$NAME``, ``${NAME}``, ``${NAME:-else}`` and ``${NAME:+then}`` are replaced; of a
            name that is not set, by nothing.
        variables: Their values.
        quotes: Quotes are taken away, and nothing is replaced between single ones.
        depth: Of the braces that it stands in.

    Raises:
        BadWord: a brace or quote is not closed; or it is above ``BUILD_ARG_CHARS_MAX`` or
            ``DEPTH_MAX``.
    """
    if depth > DEPTH_MAX:
        raise BadWord(f"more than {DEPTH_MAX} braces are in each other")
    out: list[str] = []
    size = 0
    quote = ""
    at = 0
    while at < len(text):
        char = text[at]
        if char == "\\" and quote != "'" and at + 1 < len(text):
            following = text[at + 1]
            plain = quotes and not quote
            out.append(following if plain or following in '"\\$' else char + following)
            at += 2
        elif quotes and char in "'\"" and quote in ("", char):
            quote = "" if quote else char
            at += 1
        elif char == "$" and quote != "'":
            value, at = _variable(text, at + 1, variables, depth)
            out.append(value)
            # A few variables that hold each other twice would fill any memory.
            size += len(value)
            if size > BUILD_ARG_CHARS_MAX:
                raise BadWord(f"it has more than {BUILD_ARG_CHARS_MAX} characters")
        else:
            out.append(char)
            at += 1
    if quote:
        raise BadWord(f"a quote ({quote}) is not closed")
    return "".join(out)


def _variable(text: str, at: int, variables: Mapping[str, str], depth: int) -> tuple[str, int]:
    """The value of what stands behind a ``$``, and where the text goes on."""
    if text[at : at + 1] == "{":
        end = _closing(text, at)
        inner = text[at + 1 : end]
        name = inner[: _name_length(inner, 0)]
        rest = inner[len(name) :]
        value = variables.get(name, "")
        if rest.startswith(":-"):
            return (value or _rest(rest, variables, depth)), end + 1
        if rest.startswith(":+"):
            return (_rest(rest, variables, depth) if value else ""), end + 1
        if rest or not name:
            raise BadWord(f"`${{{inner}}}` is not supported")
        return value, end + 1
    length = _name_length(text, at)
    if not length:
        return "$", at
    return variables.get(text[at : at + length], ""), at + length


def _rest(text: str, variables: Mapping[str, str], depth: int) -> str:
    """What stands behind ``:-`` or ``:+``."""
    return expand(text[2:], variables, quotes=False, depth=depth + 1)


def _closing(text: str, at: int) -> int:
    depth = 0
    for place in range(at, len(text)):
        if text[place] == "{":
            depth += 1
        elif text[place] == "}":
            depth -= 1
            if not depth:
                return place
    raise BadWord("a brace is not closed")


def _name_length(text: str, at: int) -> int:
    if at >= len(text) or not (text[at].isalpha() or text[at] == "_"):
        return 0
    end = at
    while end < len(text) and (text[end].isalnum() or text[end] == "_"):
        end += 1
    return end - at
