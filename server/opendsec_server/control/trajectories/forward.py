# SPDX-License-Identifier: AGPL-3.0-only
"""What a fast-forward does with each action of a log. Pure.

A new sandbox is brought to where another one was: what its disk holds already (it was made from a
snapshot of the other) is taken over as recorded; what came after is run again, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from opendsec_server.contract.errors import ActionUnknown, InvalidRequest
from opendsec_server.store.trajectories import Action

from .params import unpack_params
from .results import ActionResult, unpack_result

How = Literal["copied", "ran", "skipped"]
OfUnknown = Literal["stop", "skip", "run"]
"""What to do with an action of which nobody knows whether it happened: stop before anything is
done, leave it out, or run it."""


class Step(msgspec.Struct, kw_only=True, frozen=True):
    """One action, and what is done with it."""

    action: Action
    how: How


def plan(
    actions: Sequence[Action],
    *,
    holds: int,
    through: str | None,
    of_unknown: OfUnknown,
) -> list[Step]:
    """The steps to the end of a log, or to an action of it.

    Args:
        actions: The whole log, in order.
        holds: The new sandbox holds the effects of actions up to this number.
        through: The last action to take. None: all.
        of_unknown: As its type says.

    Raises:
        InvalidRequest: ``through`` is not in the log.
        ActionUnknown: an action runs still, or its outcome is not known and ``of_unknown`` says
            to stop.
    """
    if through is not None:
        last = next((a.seq for a in actions if a.action_id == through), None)
        if last is None:
            raise InvalidRequest(f"through: the log has no action `{through[:64]}`")
        actions = [action for action in actions if action.seq <= last]
    return [Step(action=action, how=_how(action, holds, of_unknown)) for action in actions]


def _how(action: Action, holds: int, of_unknown: OfUnknown) -> How:
    if action.state == "not_run":
        return "skipped"
    if action.state != "done":
        if of_unknown == "stop" or action.state == "running":
            raise ActionUnknown(
                f"action `{action.action_id}` "
                + ("runs still" if action.state == "running" else "may or may not have happened"),
                details={"action_id": action.action_id, "step": action.step},
            )
        return "skipped" if of_unknown == "skip" or action.seq <= holds else "ran"
    changes = action.kind in ("exec", "write_file") and action.error is None
    if action.seq <= holds or not changes or unpack_params(action.params).once:
        return "copied"
    return "ran"


def place_of_snapshot(actions: Sequence[Action], snapshot_id: str) -> int | None:
    """The number of the action that took a snapshot. None: none of the log did."""
    for action in actions:
        if action.kind != "snapshot" or action.state != "done":
            continue
        result = unpack_result(action.result)
        if result is not None and result.snapshot_id == snapshot_id:
            return action.seq
    return None


def diverged(before: Action, now: Action) -> bool:
    """Whether an action that ran again ended in another way. Output is not compared: times and
    process ids are in it."""
    return _end(before) != _end(now)


def _end(action: Action) -> tuple[int | None, int | None, bool, bool]:
    result = unpack_result(action.result) or ActionResult()
    return result.exit_code, result.signal, result.timed_out, action.error is not None
