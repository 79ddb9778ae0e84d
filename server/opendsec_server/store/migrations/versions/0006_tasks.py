# SPDX-License-Identifier: AGPL-3.0-only
"""Tasks and what sandboxes used."""

from __future__ import annotations

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass
