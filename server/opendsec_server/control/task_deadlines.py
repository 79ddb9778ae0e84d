# SPDX-License-Identifier: AGPL-3.0-only
"""When tasks end, so that nodes end their sandboxes also while no control plane runs.

A node keeps the end of each of its sandboxes by itself. So no member of a task is told an end later
than a little after the task's deadline: before that the control plane, when it runs, ends it with
the reason that it is the deadline.
"""

from __future__ import annotations

from collections.abc import Mapping

SLACK_S = 5.0
"""After a deadline, for the control plane to come first."""


class TaskDeadlines:
    """The deadlines of all tasks that have one, as far as this process knows. It is told of those
    that it gives itself at once, of those of other gateways at the next look."""

    def __init__(self) -> None:
        self._at: Mapping[tuple[str, str], float] = {}
        self.changes = 0
        """How many deadlines this process has given."""

    def replace(self, deadlines: Mapping[tuple[str, str], float], *, as_of: int) -> None:
        """Know these, by project and task, and no others.

        Args:
            deadlines: In Unix seconds, as they were read.
            as_of: ``changes`` before they were read: when one was given meanwhile, what was read
                may be older, and is not taken over.
        """
        if as_of == self.changes:
            self._at = deadlines

    def note(self, project_id: str, task_id: str, deadline_at: float | None) -> None:
        """A task has another deadline, or none, from now on."""
        kept = {place: at for place, at in self._at.items() if place != (project_id, task_id)}
        if deadline_at is not None:
            kept[project_id, task_id] = deadline_at
        self._at = kept
        self.changes += 1

    def last_end(self, project_id: str, task_id: str | None) -> float | None:
        """The latest end that a member of a task may be told. None: any."""
        if task_id is None:
            return None
        deadline_at = self._at.get((project_id, task_id))
        return None if deadline_at is None else deadline_at + SLACK_S

    def cap(self, project_id: str, task_id: str | None, end_at: float) -> float:
        """The end that a sandbox is told, where ``end_at`` is wanted."""
        last = self.last_end(project_id, task_id)
        return end_at if last is None else min(end_at, last)
