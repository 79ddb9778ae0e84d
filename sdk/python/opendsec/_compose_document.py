# SPDX-License-Identifier: Apache-2.0
"""YAML of compose files as plain values: variables replaced, and the line of each known.

The YAML is read by PyYAML, and nothing but plain values is made of it. What aliases and nesting
could make of it is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ._compose_values import interpolate
from ._errors import InvalidRequest

NODES_MAX = 50_000
"""Of a whole file with its aliases written out: it cannot grow without bound."""
DEPTH_MAX = 64
_TAGS = frozenset(
    f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "timestamp")
)
MERGE_TAG = "tag:yaml.org,2002:merge"

Place = tuple[str, ...]
"""Keys from the top of the file on."""


class Document:
    """YAML as plain values, with the line of each."""

    def __init__(self, path: Path, values: Mapping[str, str]) -> None:
        self.path = path
        self.values = values
        self._lines: dict[Place, int] = {}
        self._nodes = 0
        self._loader = yaml.SafeLoader("")

    def read(self, data: bytes) -> Any:
        """The whole of it.

        Raises:
            InvalidRequest: it is no YAML, or not what may be in a compose file.
        """
        try:
            node = yaml.compose(data.decode(), Loader=yaml.SafeLoader)
        except UnicodeDecodeError as exc:
            raise InvalidRequest(f"{self.path}: not UTF-8: {exc.reason}") from exc
        except yaml.YAMLError as exc:
            mark = getattr(exc, "problem_mark", None)
            at = "" if mark is None else f":{mark.line + 1}"
            problem = getattr(exc, "problem", None) or "cannot be read"
            raise InvalidRequest(f"{self.path}{at}: no YAML: {problem}") from exc
        except RecursionError:
            raise InvalidRequest(f"{self.path}: nested too deeply") from None
        return None if node is None else self._value(node, (), 0)

    def at(self, place: Place) -> str:
        """Where something is, in words."""
        line = next(
            (self._lines[place[:n]] for n in range(len(place), -1, -1) if place[:n] in self._lines),
            1,
        )
        return f"{self.path}:{line}: {'.'.join(place)}"

    def _value(self, node: yaml.Node, place: Place, depth: int) -> Any:
        self._nodes += 1
        if depth > DEPTH_MAX or self._nodes > NODES_MAX:
            raise InvalidRequest(
                f"{self.path}: too large or too deep, with its aliases written out"
            )
        self._lines.setdefault(place, node.start_mark.line + 1)
        if isinstance(node, yaml.SequenceNode):
            return [
                self._value(item, (*place, str(number)), depth + 1)
                for number, item in enumerate(node.value)
            ]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, place, depth)
        return self._scalar(node, place)

    def _mapping(self, node: yaml.MappingNode, place: Place, depth: int) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == MERGE_TAG:
                sources = (
                    value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                )
                for source in sources:
                    found = self._value(source, place, depth + 1)
                    if not isinstance(found, dict):
                        raise InvalidRequest(f"{self.at(place)}: `<<` takes mappings")
                    merged = {**found, **merged}
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise InvalidRequest(f"{self.at(place)}: a key must be a word")
            key = str(key_node.value)
            if key in own:
                raise InvalidRequest(
                    f"{self.path}:{key_node.start_mark.line + 1}: `{key[:64]}` is there twice"
                )
            self._lines[*place, key] = key_node.start_mark.line + 1
            own[key] = self._value(value_node, (*place, key), depth + 1)
        return {**merged, **own}

    def _scalar(self, node: yaml.Node, place: Place) -> Any:
        assert isinstance(node, yaml.ScalarNode)
        if node.tag not in _TAGS:
            raise InvalidRequest(f"{self.at(place)}: the tag `{node.tag[:64]}` is not known")
        text = str(node.value)
        try:
            found = interpolate(text, self.values)
        except ValueError as exc:
            raise InvalidRequest(f"{self.at(place)}: {exc}") from None
        if node.style is not None or node.tag.endswith(":str"):
            plain = node.style is None and found != text
            if not plain:
                return found
            # A number that came from a variable is a number.
            tag = self._loader.resolve(  # type: ignore[no-untyped-call]
                yaml.ScalarNode, found, (True, False)
            )
            node = yaml.ScalarNode(tag, found)
        try:
            return self._loader.construct_object(node)
        except (yaml.YAMLError, ValueError):
            return found
