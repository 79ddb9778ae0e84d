# SPDX-License-Identifier: Apache-2.0
# Generated from _async/_nodes.py by scripts/generate_sync.py. Do not edit.
# ruff: noqa: RUF100, SIM117, UP028
"""The machines that run sandboxes, for operators: keys of the installation's first project."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from urllib.parse import quote

import msgspec

from opendsec._node_models import NodeInfo

from ._transport import Transport


class _Nodes(msgspec.Struct):
    nodes: list[NodeInfo] = []


class _Forgotten(msgspec.Struct):
    lost: int = 0


class Nodes:
    """The nodes of an installation. One is named by its id, or as the server's settings name it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self) -> builtins.list[NodeInfo]:
        """All of them, those that cannot be reached too.

        Raises:
            Forbidden: the key is not of the installation's first project.
        """
        return (self._transport.api("GET", "/v1/nodes", _Nodes)).nodes

    def get(self, node: str) -> NodeInfo:
        """One of them.

        Raises:
            Forbidden: as ``list``.
            NotFound: there is none.
        """
        return self._transport.api("GET", _path(node), NodeInfo)

    def drain(self, node: str) -> NodeInfo:
        """Let a node take no new sandboxes. Those that it has go on.

        Raises:
            Forbidden, NotFound: as ``get``.
            NodeUnavailable: it cannot be reached, and so gets none anyway.
        """
        return self._mark(node, {"draining": True})

    def undrain(self, node: str) -> NodeInfo:
        """Let it take new sandboxes again.

        Raises:
            As ``drain``.
        """
        return self._mark(node, {"draining": False})

    def set_labels(self, node: str, labels: Mapping[str, str]) -> NodeInfo:
        """Replace a node's labels. Creates may ask for them (``node_labels``).

        Raises:
            As ``drain``.
            InvalidRequest: too many, or one is too long.
        """
        return self._mark(node, {"labels": dict(labels)})

    def forget(self, node: str) -> int:
        """Give up what a node that is gone has: its sandboxes end as lost, paused ones too.

        Returns:
            How many they were.

        Raises:
            Forbidden, NotFound: as ``get``.
            Conflict: the node is there.
        """
        path = f"{_path(node)}/forget"
        return (self._transport.api("POST", path, _Forgotten)).lost

    def _mark(self, node: str, marks: Mapping[str, object]) -> NodeInfo:
        return self._transport.api("PATCH", _path(node), NodeInfo, body=dict(marks))


def _path(node: str) -> str:
    return f"/v1/nodes/{quote(node, safe='')}"
