# SPDX-License-Identifier: AGPL-3.0-only
"""Leases by which one process at a time works on something, in the time of the store's users."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

LEASE_S_MAX = 120.0
"""No lease is given for so long."""


def is_over(column: sa.ColumnElement[Any], now: float) -> sa.ColumnElement[bool]:
    """Whether the holder of a lease counts as gone. One that ends later than any can was given
    before the clock was set back: its holder, if there is one, renews it soon."""
    return (column < now) | (column > now + LEASE_S_MAX)
