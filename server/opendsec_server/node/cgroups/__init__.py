# SPDX-License-Identifier: AGPL-3.0-only
"""Control groups of sandboxes, read and removed from outside. v2, v1 and hybrid hosts.

The OCI runtime makes the groups and sets the limits; this package watches, kills and removes.
"""

from __future__ import annotations

from .base import CgroupSet, MemoryNow, Usage
from .detect import detect, host_mount_table

__all__ = ["CgroupSet", "MemoryNow", "Usage", "detect", "host_mount_table"]
