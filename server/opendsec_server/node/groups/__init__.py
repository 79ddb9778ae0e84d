# SPDX-License-Identifier: AGPL-3.0-only
"""Groups: sandboxes of one project that reach each other, by address and by name."""

from .membership import Groups

__all__ = ["Groups"]
