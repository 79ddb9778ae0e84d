# SPDX-License-Identifier: AGPL-3.0-only
"""Live sandboxes are found by their node: a gateway compares many nodes with their records."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index(
        "ix_sandboxes_live_node",
        "sandboxes",
        ["node_id"],
        sqlite_where=sa.text("ended_at IS NULL"),
        postgresql_where=sa.text("ended_at IS NULL"),
    )


def downgrade() -> None:
    op.drop_index("ix_sandboxes_live_node", table_name="sandboxes")
