# SPDX-License-Identifier: Apache-2.0
"""``opendsec ls --watch``: the list, for as long as somebody looks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from opendsec import Client, OpendsecError, SandboxInfo, SandboxNotFound

from ._output import draw_table, note, print_json

INTERVAL_S = 1.0
AWAY_RETRY_S = 5.0

List = Callable[[], list[SandboxInfo]]
Table = Callable[[Sequence[SandboxInfo]], tuple[list[str], list[list[str]]]]


def watch(client: Client, read: List, table: Table, *, as_json: bool) -> None:
    """Show what is listed and what becomes of it, until interrupted: a table that is drawn anew
    on a terminal; else one line per change, which with ``as_json`` is one JSON document.

    Args:
        client: Asked for the end of what is listed no more.
        read: What is listed now.
        table: Headings and rows of a list.
        as_json: For programs.

    Raises:
        OpendsecError: the first list failed; or a later one in a way that asking again does not
            help against.
    """
    lists = _lists(read)
    if sys.stdout.isatty() and not as_json:
        with draw_table() as draw:
            for records in lists:
                draw(*table(records))
        return
    known: dict[str, SandboxInfo] = {}
    for records in lists:
        now = {record.sandbox_id: record for record in records}
        for record in reversed(records):  # The newest comes first in a list.
            before = known.get(record.sandbox_id)
            if before is None:
                _say("new", None, record, as_json)
            elif before != record:
                _say("changed", before, record, as_json)
        for sandbox_id, before in known.items():
            if sandbox_id not in now:
                _say("gone", before, _last(client, before), as_json)
        sys.stdout.flush()
        known = now


def _lists(read: List) -> Iterator[list[SandboxInfo]]:
    """One list after another. Between two, a server may be away for a while."""
    yield read()
    away = False
    while True:
        time.sleep(AWAY_RETRY_S if away else INTERVAL_S)
        try:
            records = read()
        except OpendsecError as error:
            if not error.retryable:
                raise
            if not away:
                note(f"opendsec: {error.message}; trying again")
            away = True
            continue
        away = False
        yield records


def _last(client: Client, before: SandboxInfo) -> SandboxInfo:
    """What became of one that is listed no more, without what lists do not tell."""
    try:
        record = client.info(before.sandbox_id)
    except SandboxNotFound:
        return before
    except OpendsecError as error:
        if not error.retryable:
            raise
        return before
    return msgspec.structs.replace(
        record, env=None, usage=None, access_token=None, traffic_token=None
    )


def _say(change: str, before: SandboxInfo | None, record: SandboxInfo, as_json: bool) -> None:
    at = datetime.now(UTC)
    if as_json:
        line: dict[str, Any] = {"at": at, "change": change, "sandbox": record}
        print_json(line)
        return
    state = record.state
    if before is not None and before.state != state:
        state = f"{before.state} -> {state}"
    why = record.end_reason or ""
    moment = at.astimezone().isoformat(sep=" ", timespec="seconds")
    template = record.template or record.template_id
    print(f"{moment}  {change:7}  {record.sandbox_id}  {template}  {state} {why}".rstrip())
