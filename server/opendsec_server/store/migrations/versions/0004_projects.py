# SPDX-License-Identifier: AGPL-3.0-only
"""Projects that nest, principals, roles, tokens and the audit log."""

from __future__ import annotations

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass
