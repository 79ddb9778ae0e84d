# SPDX-License-Identifier: AGPL-3.0-only
"""Trajectories: the ordered actions of sandboxes."""

from __future__ import annotations

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass
