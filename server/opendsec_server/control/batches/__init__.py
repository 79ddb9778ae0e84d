# SPDX-License-Identifier: AGPL-3.0-only
"""Many creates in one call: queued, fair between projects, exactly once per item."""

from .params import BatchParams
from .service import Batches, Watched, seat_of

__all__ = ["BatchParams", "Batches", "Watched", "seat_of"]
