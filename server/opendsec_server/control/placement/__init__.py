# SPDX-License-Identifier: AGPL-3.0-only
"""Which node a new sandbox goes to. Pure: no clock, no network, no state that outlives a process.

Filter, then take the least loaded of a few drawn at random (power of k choices), with what this
process has placed itself and no report of the node shows yet on top. Several gateways need not
speak to each other, and the node has the last word.
"""

from __future__ import annotations

from .choose import SAMPLED, Placement
from .need import Need
from .standing import Standing

__all__ = ["SAMPLED", "Need", "Placement", "Standing"]
