# SPDX-License-Identifier: AGPL-3.0-only
"""The table of the audit log: only ever appended to, each row tied to the one before."""

from __future__ import annotations

import sqlalchemy as sa

from .metadata import METADATA

AUDIT = sa.Table(
    "audit",
    METADATA,
    sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("request_id", sa.Text, nullable=False),
    # ``key``, ``principal``, ``token`` or ``none``.
    sa.Column("actor_kind", sa.Text, nullable=False),
    sa.Column("actor_id", sa.Text, nullable=True),
    # The key or token that was shown.
    sa.Column("credential_id", sa.Text, nullable=True),
    # None: nobody knew who called. No foreign key: the log outlives everything.
    sa.Column("project_id", sa.Text, nullable=True),
    sa.Column("action", sa.Text, nullable=False),
    sa.Column("object", sa.Text, nullable=True),
    # ``ok``, or the code of the error.
    sa.Column("outcome", sa.Text, nullable=False),
    sa.Column("status", sa.Integer, nullable=False),
    sa.Column("address", sa.Text, nullable=True),
    sa.Column("hash", sa.Text, nullable=False),
    # Of the hash, with the installation's secret.
    sa.Column("mac", sa.Text, nullable=False),
    sa.Index("ix_audit_project", "project_id", "seq"),
)
