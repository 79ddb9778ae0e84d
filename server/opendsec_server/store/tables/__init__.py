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
from .batches import BATCH_ITEMS, BATCHES
from .functions import FUNCTION_POOLS, FUNCTION_WORKERS
from .groups import GROUP_MEMBERS, GROUPS
from .images import IMAGE_ACCESS
from .metadata import METADATA
from .sandboxes import IDEMPOTENCY, SANDBOX_TRANSITIONS, SANDBOXES
from .snapshots import SNAPSHOTS
from .tasks import SANDBOX_USAGE, TASK_ITEMS, TASK_OPERATIONS, TASKS
from .templates import BUILD_STEPS, TEMPLATE_BUILDS, TEMPLATE_TAGS, TEMPLATES
from .trajectories import ACTIONS, TRAJECTORIES

__all__ = [
    "ACTIONS",
    "API_KEYS",
    "AUDIT",
    "BATCHES",
    "BATCH_ITEMS",
    "BUILD_STEPS",
    "FUNCTION_POOLS",
    "FUNCTION_WORKERS",
    "GRANTS",
    "GROUPS",
    "GROUP_MEMBERS",
    "IDEMPOTENCY",
    "IMAGE_ACCESS",
    "METADATA",
    "PRINCIPALS",
    "PROJECTS",
    "PROJECT_LINES",
    "PROJECT_USE",
    "SANDBOXES",
    "SANDBOX_TRANSITIONS",
    "SANDBOX_USAGE",
    "SNAPSHOTS",
    "TASKS",
    "TASK_ITEMS",
    "TASK_OPERATIONS",
    "TEMPLATES",
    "TEMPLATE_BUILDS",
    "TEMPLATE_TAGS",
    "TOKENS",
    "TRAJECTORIES",
]
