# SPDX-License-Identifier: AGPL-3.0-only
"""The nodes of an installation, and the one ``NodeClient`` that stands for all of them."""

from __future__ import annotations

from .fleet import Fleet, NodeRef
from .member import Member, NodeNotReached, NodeSource

__all__ = ["Fleet", "Member", "NodeNotReached", "NodeRef", "NodeSource"]
