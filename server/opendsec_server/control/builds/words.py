# SPDX-License-Identifier: AGPL-3.0-only
"""Words of a Dockerfile: quotes, and variables in them.

https://docs.docker.com/reference/dockerfile/#environment-replacement
"""

from __future__ import annotations

from collections.abc import Mapping

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class BadWord(ValueError):
    """A quote or brace is not closed."""


def expand(text: str, variables: Mapping[str, str], *, quotes: bool = True) -> str:
    """A word without its quotes, and with the variables' values.

    Args:
        text: ``$NAME``, ``${NAME}``, ``${NAME:-else}`` and ``${NAME:+then}`` are replaced; of a
            name that is not set, by nothing.
        variables: Their values.
        quotes: Quotes are taken away, and nothing is replaced between single ones.

    Raises:
        BadWord: a brace or quote is not closed.
    """
    out: list[str] = []
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
            value, at = _variable(text, at + 1, variables)
            out.append(value)
        else:
            out.append(char)
            at += 1
    if quote:
        raise BadWord(f"a quote ({quote}) is not closed")
    return "".join(out)


def _variable(text: str, at: int, variables: Mapping[str, str]) -> tuple[str, int]:
    """The value of what stands behind a ``$``, and where the text goes on."""
    if text[at : at + 1] == "{":
        end = _closing(text, at)
        inner = text[at + 1 : end]
        name = inner[: _name_length(inner)]
        rest = inner[len(name) :]
        value = variables.get(name, "")
        if rest.startswith(":-"):
            return (value or expand(rest[2:], variables, quotes=False)), end + 1
        if rest.startswith(":+"):
            return (expand(rest[2:], variables, quotes=False) if value else ""), end + 1
        if rest or not name:
            raise BadWord(f"`${{{inner}}}` is not supported")
        return value, end + 1
    length = _name_length(text[at:])
    if not length:
        return "$", at
    return variables.get(text[at : at + length], ""), at + length


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


def _name_length(text: str) -> int:
    if not text or not (text[0].isalpha() or text[0] == "_"):
        return 0
    return next(
        (n for n, char in enumerate(text) if not (char.isalnum() or char == "_")), len(text)
    )
