# SPDX-License-Identifier: Apache-2.0
# Generated from _async/_batches.py by scripts/generate_sync.py. Do not edit.
# ruff: noqa: RUF100, SIM117, UP028
"""Many sandboxes in one call: batches of creates, and one thing done to many."""

from __future__ import annotations

import builtins
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack
from urllib.parse import quote

import msgspec

from opendsec import _limits
from opendsec._answers import from_native
from opendsec._batch_models import BatchInfo, BulkCommandResult, BulkOutcome
from opendsec._errors import BadResponse, InvalidRequest, OpendsecError
from opendsec._models import SandboxInfo
from opendsec._options import SandboxOptions, body_of
from opendsec._progress import ProgressBar
from opendsec._retry import Patience, Repeat

from ._concurrency import all_of, sleep
from ._ndjson import open_lines
from ._sandbox import Sandbox

if TYPE_CHECKING:
    from ._client import Client


class _Page(msgspec.Struct):
    batches: list[BatchInfo] = []
    next_cursor: str | None = None


class _Line(msgspec.Struct):
    batch: BatchInfo | None = None
    index: int = -1
    seq: int = 0
    sandbox: SandboxInfo | None = None
    error: dict[str, Any] | None = None


class _BulkLine(msgspec.Struct):
    sandbox_id: str = ""
    state: str | None = None
    result: BulkCommandResult | None = None
    error: dict[str, Any] | None = None


class BatchItem:
    """What became of one item of a batch.

    Attributes:
        index: Which, from 0 on.
        seq: The order in which outcomes came, from 1 on; ``Batch.results(after=seq)`` goes
            on behind it.
        sandbox: It was made. None: see ``error``.
        error: Why it was not; ``error.fault`` says whose fault that is, and ``error.retryable``
            whether it may be asked for again.
    """

    def __init__(
        self, index: int, seq: int, sandbox: Sandbox | None, error: OpendsecError | None
    ) -> None:
        self.index = index
        self.seq = seq
        self.sandbox = sandbox
        self.error = error

    def __repr__(self) -> str:
        what = self.error.code if self.error is not None else None
        if self.sandbox is not None:
            what = self.sandbox.sandbox_id
        return f"<item {self.index}: {what}>"

    def unwrap(self) -> Sandbox:
        """The sandbox.

        Raises:
            OpendsecError: it was not made.
        """
        if self.sandbox is None:
            assert self.error is not None
            raise self.error
        return self.sandbox


class Batch:
    """Many sandboxes asked for in one call. Iterate over it: items come as they are made.

    The batch belongs to the server: it goes on when this program ends. Its id, or a repeated call
    with the same idempotency key, finds it again with exactly what was made.

    Attributes:
        info: The batch as last seen.
    """

    def __init__(self, client: Client, info: BatchInfo) -> None:
        self._client = client
        self._transport = client._transport
        self.info = info

    @property
    def batch_id(self) -> str:
        """Its id."""
        return self.info.batch_id

    def __iter__(self) -> Iterator[BatchItem]:
        """Every item, as soon as its outcome is known."""
        for item in self.results():
            yield item

    def results(self, *, after: int = 0, progress: bool = False) -> Iterator[BatchItem]:
        """Items in the order in which their outcomes came, until all are there.

        A connection that breaks is made anew; no item comes twice and none is left out.

        Args:
            after: Leave out those up to this ``seq``.
            progress: Draw a progress bar on the terminal.

        Raises:
            BatchNotFound: the server does not know it (any more).
            ConnectionFailed: the server could not be reached, also after the retries.
        """
        bar = ProgressBar(self.info.asked) if progress else None
        good, failed = 0, 0
        patience = Patience(self._transport.retry)
        while True:
            patience.asking()
            try:
                lines = open_lines(
                    self._transport,
                    "GET",
                    f"{_path(self.batch_id)}/results",
                    _Line,
                    params={"after": after},
                )
                with lines:
                    for line in lines:
                        if line.batch is not None:
                            self.info = line.batch
                            if bar is not None:
                                good = self.info.made
                                failed = self.info.failed
                                bar.update(good, failed)
                            continue
                        item = self._item(line)
                        after = item.seq
                        patience.heard()
                        if bar is not None and after > good + failed:
                            good += item.error is None
                            failed += item.error is not None
                            bar.update(good, failed)
                        yield item
                break
            except OpendsecError as error:
                if patience.spent(error):
                    raise
            sleep(_limits.RECONNECT_PAUSE_S)
        self.refresh()
        if bar is not None:
            bar.finish(self.info.made, self.info.failed)

    def all(self, *, progress: bool = False) -> builtins.list[BatchItem]:
        """Wait for every item; they are in the order of their index."""
        items = all_of(self.results(progress=progress))
        return sorted(items, key=lambda item: item.index)

    def refresh(self) -> BatchInfo:
        """Ask how far it is."""
        self.info = self._transport.api("GET", _path(self.batch_id), BatchInfo)
        return self.info

    def cancel(self) -> BatchInfo:
        """Let no more items begin; what has begun is made. ``kill`` ends the sandboxes.

        Raises:
            BatchNotFound: the server does not know it (any more).
        """
        self.info = self._transport.api("POST", f"{_path(self.batch_id)}/cancel", BatchInfo)
        return self.info

    def kill(self) -> builtins.list[BulkOutcome]:
        """End all sandboxes of it that live."""
        return all_of(self._client.batches.kill(batch_id=self.batch_id))

    def _item(self, line: _Line) -> BatchItem:
        if line.sandbox is not None:
            sandbox = Sandbox(self._client, line.sandbox, owns_client=False)
            return BatchItem(line.index, line.seq, sandbox, None)
        if line.error is not None:
            return BatchItem(line.index, line.seq, None, from_native(line.error))
        raise BadResponse("A line of the batch holds neither a sandbox nor an error.")


class Batches:
    """Makes many sandboxes in one call, and does one thing to many."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._transport = client._transport

    def create(
        self,
        count: int | None = None,
        *,
        items: Sequence[SandboxOptions] | None = None,
        wait_s: float | None = None,
        idempotency_key: str | None = None,
        **common: Unpack[SandboxOptions],
    ) -> Batch:
        """Ask for many sandboxes; returns as soon as the server has recorded that.

        ::

            for item in client.batches.create(1000, template="base", memory_mb=128):
                if item.error is None:
                    ...

        Args:
            count: How many, all alike.
            items: Instead: one for each, with what it has otherwise than ``common``. ``env`` and
                ``metadata`` are added to the common ones.
            wait_s: How long an item may wait for its turn. None: an hour. The time to start, and
                ``timeout_s``, begin with the turn.
            idempotency_key: Give your own to find the same batch from a program that was started
                anew. Each item's key is made of it and of the index. None: a new one per call.
            common: What all are created with: the arguments of ``Client.create``.

        Raises:
            InvalidRequest: a value is malformed or out of range. Nothing was asked for.
            TemplateNotFound, SnapshotNotFound: there is no such template or snapshot.
            IdempotencyMismatch: the key was used before with other arguments.
        """
        body: dict[str, Any] = {"sandbox": body_of(common)}
        if count is not None:
            body["count"] = count
        if items is not None:
            body["items"] = [body_of(item) for item in items]
        if wait_s is not None:
            body["wait_s"] = math.ceil(wait_s)
        info = self._transport.api(
            "POST",
            "/v1/batches",
            BatchInfo,
            params={"follow": "false"},
            body=body,
            headers={"Idempotency-Key": idempotency_key or uuid.uuid4().hex},
        )
        return Batch(self._client, info)

    def get(self, batch_id: str) -> Batch:
        """A batch that was asked for before, also by another program.

        Raises:
            BatchNotFound: the server does not know it (any more).
        """
        info = self._transport.api("GET", _path(batch_id), BatchInfo)
        return Batch(self._client, info)

    def list(self, *, limit: int | None = None) -> Iterator[BatchInfo]:
        """The project's batches, newest first.

        Args:
            limit: End after so many. None: all.
        """
        params: dict[str, str | int | builtins.list[str]] = {}
        left = limit
        while left is None or left > 0:
            params["limit"] = (
                _limits.LIST_PAGE_MAX if left is None else min(left, _limits.LIST_PAGE_MAX)
            )
            page = self._transport.api("GET", "/v1/batches", _Page, params=params)
            for batch in page.batches:
                yield batch
            if page.next_cursor is None:
                return
            params["cursor"] = page.next_cursor
            if left is not None:
                left -= len(page.batches)

    def exec(
        self,
        command: str,
        *,
        ids: Sequence[str] | None = None,
        task_id: str | None = None,
        labels: Sequence[str] = (),
        batch_id: str | None = None,
        user: str | None = None,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60,
        output_bytes: int | None = None,
        concurrency: int | None = None,
    ) -> Iterator[BulkOutcome]:
        """Run a command in many sandboxes; results come as they end.

        Give either ``ids``, or one or more of ``task_id``, ``labels`` and ``batch_id``. The
        commands go on when you stop iterating. A call whose answer broke off is not repeated: the
        commands have run.

        Args:
            command: A line for the sandbox's login shell.
            ids: In these.
            task_id: In those of this job.
            labels: In those that have all of these.
            batch_id: In those that this batch made.
            user: None: each sandbox's default user.
            workdir: None: each sandbox's default.
            env: Added to each sandbox's.
            timeout_s: After it a command's whole process tree is killed.
            output_bytes: Of stdout and stderr each the first so many are kept. None: 64 KiB.
            concurrency: How many commands run at one time. None: 64.

        Raises:
            InvalidRequest: nothing is selected, or a value is out of range.
            ConnectionFailed: the answer broke off.
        """
        more: dict[str, Any] = {
            "command": command,
            "user": user,
            "workdir": workdir,
            "env": dict(env) if env else None,
            "timeout_s": math.ceil(timeout_s),
            "output_bytes": output_bytes,
            "concurrency": concurrency,
        }
        select = _selection(ids, task_id, labels, batch_id)
        for outcome in self._bulk("exec", select, more, Repeat.IF_UNSENT):
            yield outcome

    def kill(
        self,
        *,
        ids: Sequence[str] | None = None,
        task_id: str | None = None,
        labels: Sequence[str] = (),
        batch_id: str | None = None,
    ) -> Iterator[BulkOutcome]:
        """End many sandboxes; see ``exec`` for how they are selected. Go through all of it, or
        not: they are ended all the same.

        Raises:
            InvalidRequest: nothing is selected.
            ConnectionFailed: the answer broke off.
        """
        select = _selection(ids, task_id, labels, batch_id)
        for outcome in self._bulk("kill", select, {}, Repeat.IDEMPOTENT):
            yield outcome

    def set_timeout(
        self,
        timeout_s: float,
        *,
        ids: Sequence[str] | None = None,
        task_id: str | None = None,
        labels: Sequence[str] = (),
        batch_id: str | None = None,
    ) -> Iterator[BulkOutcome]:
        """Let many sandboxes end ``timeout_s`` from now, sooner or later than before; see ``exec``
        for how they are selected.

        Raises:
            InvalidRequest: nothing is selected, or it is too long.
            ConnectionFailed: the answer broke off.
        """
        select = _selection(ids, task_id, labels, batch_id)
        more = {"timeout_s": math.ceil(timeout_s)}
        for outcome in self._bulk("timeout", select, more, Repeat.IDEMPOTENT):
            yield outcome

    def _bulk(
        self, what: str, select: dict[str, Any], more: dict[str, Any], repeat: Repeat
    ) -> Iterator[BulkOutcome]:
        body = {name: value for name, value in more.items() if value is not None}
        lines = open_lines(
            self._transport,
            "POST",
            f"/v1/sandboxes/bulk/{what}",
            _BulkLine,
            body={"select": select, **body},
            repeat=repeat,
        )
        with lines:
            for line in lines:
                yield BulkOutcome(
                    sandbox_id=line.sandbox_id,
                    state=line.state,
                    result=line.result,
                    error=None if line.error is None else from_native(line.error),
                )


def _selection(
    ids: Sequence[str] | None,
    task_id: str | None,
    labels: Sequence[str],
    batch_id: str | None,
) -> dict[str, Any]:
    select: dict[str, Any] = {
        "ids": None if ids is None else list(ids),
        "task_id": task_id,
        "labels": list(labels) or None,
        "batch_id": batch_id,
    }
    return {name: value for name, value in select.items() if value is not None}


def _path(batch_id: str) -> str:
    """Its path; the id is quoted, so that a bad one cannot name another path."""
    if not batch_id:
        raise InvalidRequest("The batch id is empty.")
    return f"/v1/batches/{quote(batch_id, safe='')}"
