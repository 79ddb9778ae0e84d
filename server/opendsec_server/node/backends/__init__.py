# SPDX-License-Identifier: AGPL-3.0-only
"""The ways to run a sandbox. ``base`` says what each must do."""

from __future__ import annotations

from .base import Backend

__all__ = ["Backend"]
