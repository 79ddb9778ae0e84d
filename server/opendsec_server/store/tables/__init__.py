# SPDX-License-Identifier: AGPL-3.0-only
"""Tables of the control plane, a module for each concern.

Times are Unix seconds. Maps and lists are JSON text: the store never looks inside them,
except for metadata and labels (see ``packing``).
"""

from .accounts import (
    API_KEYS,
    GRANTS,
    PRINCIPALS,
    PROJECT_LINES,
    PROJECT_USE,
    PROJECTS,
    TOKENS,
)
from .audit import AUDIT
from .metadata import METADATA
from .sandboxes import IDEMPOTENCY, SANDBOX_TRANSITIONS, SANDBOXES
from .snapshots import SNAPSHOTS
from .templates import BUILD_STEPS, TEMPLATE_BUILDS, TEMPLATE_TAGS, TEMPLATES

__all__ = [
    "API_KEYS",
    "AUDIT",
    "BUILD_STEPS",
    "GRANTS",
    "IDEMPOTENCY",
    "METADATA",
    "PRINCIPALS",
    "PROJECTS",
    "PROJECT_LINES",
    "PROJECT_USE",
    "SANDBOXES",
    "SANDBOX_TRANSITIONS",
    "SNAPSHOTS",
    "TEMPLATES",
    "TEMPLATE_BUILDS",
    "TEMPLATE_TAGS",
    "TOKENS",
]
