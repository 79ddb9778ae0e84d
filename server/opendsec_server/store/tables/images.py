# SPDX-License-Identifier: AGPL-3.0-only
"""The table of images that not every project may use."""

from __future__ import annotations

import sqlalchemy as sa

from .metadata import METADATA

# An image that is not here is everybody's. ``*`` in place of a project: it has become so.
# ``pull:`` and a name in place of a digest: it is being pulled with a password of the project.
IMAGE_ACCESS = sa.Table(
    "image_access",
    METADATA,
    sa.Column("digest", sa.Text, primary_key=True),
    sa.Column("project_id", sa.Text, primary_key=True),
    sa.Column("created_at", sa.Double, nullable=False),
)
