# SPDX-License-Identifier: AGPL-3.0-only
"""Serves a ``NodeClient`` to gateways over HTTP (see ``contract.node_wire``)."""

from __future__ import annotations

from .app import NodeApp

__all__ = ["NodeApp"]
