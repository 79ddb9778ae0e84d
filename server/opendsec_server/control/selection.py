# SPDX-License-Identifier: AGPL-3.0-only
"""Which sandboxes an operation on many is about."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from opendsec_server.contract import limits
from opendsec_server.contract.errors import InvalidRequest
from opendsec_server.store.selections import live_ids
from opendsec_server.store.store import Store

from .iam import Caller
from .params import check_labels, check_text


class Selection(msgspec.Struct, kw_only=True, frozen=True):
    """Sandboxes of the caller's project that have not ended: these, or those that fit all that is
    given."""

    ids: tuple[str, ...] | None = None
    task_id: str | None = None
    labels: tuple[str, ...] = ()
    batch_id: str | None = None


def check_selection(selection: Selection) -> None:
    """Refuse what selects everything by mistake, or makes no sense.

    Raises:
        InvalidRequest: the message names the field.
    """
    words = selection.task_id is not None or selection.labels or selection.batch_id is not None
    if selection.ids is None and not words:
        raise InvalidRequest(
            "select: nothing is given", remediation="Give ids, task_id, labels or batch_id."
        )
    if selection.ids is not None and words:
        raise InvalidRequest("select: give either ids, or task_id, labels and batch_id")
    if selection.ids is not None and len(selection.ids) > limits.BATCH_ITEMS_MAX:
        raise InvalidRequest(f"select.ids: at most {limits.BATCH_ITEMS_MAX}")
    if selection.task_id is not None:
        check_text("select.task_id", selection.task_id, limits.TASK_ID_CHARS_MAX)
    if selection.batch_id is not None:
        check_text("select.batch_id", selection.batch_id, limits.NAME_CHARS_MAX)
    check_labels(list(selection.labels))


async def selected_ids(store: Store, caller: Caller, selection: Selection) -> Sequence[str]:
    """The ids, each once. Of given ones not all need to exist, or be the caller's.

    Raises:
        InvalidRequest: as ``check_selection``.
        StoreUnavailable: not known.
    """
    check_selection(selection)
    if selection.ids is not None:
        return list(dict.fromkeys(selection.ids))
    return await live_ids(
        store,
        caller.project_id,
        task_id=selection.task_id,
        labels=selection.labels,
        batch_id=selection.batch_id,
    )
