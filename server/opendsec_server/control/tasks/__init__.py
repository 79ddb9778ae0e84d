# SPDX-License-Identifier: AGPL-3.0-only
"""Tasks: the caller's jobs, and what is done to all sandboxes of one."""

from .service import TaskLimits, Tasks, TaskView

__all__ = ["TaskLimits", "TaskView", "Tasks"]
