# SPDX-License-Identifier: AGPL-3.0-only
"""Running actions belong to a process, and function pools count their changes: several gateways
share one store."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("actions", sa.Column("owner", sa.Text, nullable=True))
    op.add_column(
        "actions", sa.Column("lease_until", sa.Double, nullable=False, server_default="0")
    )
    op.add_column(
        "function_pools", sa.Column("version", sa.Integer, nullable=False, server_default="0")
    )


def downgrade() -> None:
    op.drop_column("function_pools", "version")
    op.drop_column("actions", "lease_until")
    op.drop_column("actions", "owner")
