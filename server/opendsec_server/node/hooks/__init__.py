# SPDX-License-Identifier: AGPL-3.0-only
"""The steps that make a sandbox, in order, each with its way back.

``setup`` may fail at any point. ``teardown`` must work after a complete, a partial and no set-up
at all, also in another process than the one that set up: it looks at the machine, not at memory.
Which steps a backend has is said in ``node.backends``.
"""

from __future__ import annotations

from .base import Hook, set_up, tear_down

__all__ = ["Hook", "set_up", "tear_down"]
