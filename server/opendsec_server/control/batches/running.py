# SPDX-License-Identifier: AGPL-3.0-only
"""One batch that this process works on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from opendsec_server.contract.errors import Internal, OpendsecError
from opendsec_server.control.iam import Caller
from opendsec_server.control.origins import Origins
from opendsec_server.control.params import CreateParams
from opendsec_server.control.snapshots import Origin
from opendsec_server.store.batches import Batch

from .params import BatchParams

log = structlog.get_logger(__name__)

_Key = tuple[Any, ...]


class RunningBatch:
    """What this process knows of a batch of its own.

    Origins are found once for all items that start from the same, and lent until the batch is
    over; what takes long (an image is pulled) holds up this batch only.

    Args:
        batch: As the store has it.
        params: What was asked for. None: that cannot be read, and no more items begin.
        caller: The project in whose name sandboxes are made.
        origins: Find what they start from.
        wake: Called when the batch can go on.
    """

    def __init__(
        self,
        batch: Batch,
        params: BatchParams | None,
        caller: Caller,
        origins: Origins,
        wake: Callable[[], None],
    ) -> None:
        self.batch = batch
        self.params = params
        self.caller = caller
        self.open = 0
        """Items that have begun here and have no outcome yet."""
        # Of a clock that is never set: a step of the other one must not end the wait.
        self.begin_until = asyncio.get_running_loop().time() + batch.begin_until - time.time()
        self.blocked_until = 0.0
        """Loop time until which its project may not create."""
        self._origins = origins
        self._wake = wake
        self._found: dict[_Key, Origin | OpendsecError] = {}
        self._finding: asyncio.Task[None] | None = None
        self._lent = contextlib.AsyncExitStack()

    @property
    def batch_id(self) -> str:
        """Its id."""
        return self.batch.batch_id

    @property
    def waiting(self) -> int:
        """Items that have not begun."""
        return self.batch.asked - self.batch.next_index

    def ready(self, now: float) -> int:
        """How many items, in order, could begin now, as far as is known."""
        if self.blocked_until > now or self._finding is not None:
            return 0
        return self.waiting

    def origin(self, params: CreateParams) -> Origin | OpendsecError | None:
        """What an item starts from, or why there is no such thing. None: it is being found out;
        until then the batch is not ready."""
        key = _key(params)
        found = self._found.get(key)
        if found is None and self._finding is None:
            self._finding = asyncio.create_task(self._find(key, params), name="batch-origin")
        return found

    async def _find(self, key: _Key, params: CreateParams) -> None:
        try:
            self._found[key] = await self._lent.enter_async_context(
                self._origins.using(self.caller, params)
            )
        except OpendsecError as exc:
            self._found[key] = exc
        except Exception:
            log.exception("the origin of a batch was not found", batch_id=self.batch_id)
            self._found[key] = Internal("what to start from was not found because of a defect")
        finally:
            self._finding = None
            self._wake()

    async def close(self) -> None:
        """Give back what was lent."""
        if self._finding is not None:
            self._finding.cancel()
            await asyncio.gather(self._finding, return_exceptions=True)
        await self._lent.aclose()


def _key(params: CreateParams) -> _Key:
    """What decides about the origin."""
    env = tuple(sorted(params.env.items())) if params.extra.start_image else ()
    return params.template, msgspec.json.encode(params.extra), env
