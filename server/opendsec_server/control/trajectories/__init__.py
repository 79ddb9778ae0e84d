# SPDX-License-Identifier: AGPL-3.0-only
"""Trajectories: what was done in sandboxes, recorded before it runs and never done twice."""

from .params import ActionParams
from .service import Trajectories

__all__ = ["ActionParams", "Trajectories"]
