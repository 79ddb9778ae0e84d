# SPDX-License-Identifier: AGPL-3.0-only
"""Routes for the edge, and the automatic resume of what it asks for."""

from __future__ import annotations

import asyncio
import hmac
import time

import structlog

from opendsec_server.contract.errors import (
    Forbidden,
    SandboxNotFound,
    StateConflict,
    Unauthenticated,
)
from opendsec_server.contract.limits import AUTO_RESUME_TIMEOUT_S_MIN
from opendsec_server.contract.node import ConsoleKind, NodeClient, Route
from opendsec_server.contract.signatures import file_signature
from opendsec_server.contract.states import State
from opendsec_server.store import sandboxes
from opendsec_server.store.records import SandboxRecord
from opendsec_server.store.store import Store

from .lifecycle import Connected, Lifecycle
from .params import AGENT_PORT
from .tokens import TokenMint

log = structlog.get_logger(__name__)

TIME_DIGITS_MAX = 15
ROUTE_TRIES = 3
"""A sandbox can pause again between its resume and the route to it."""


class Routes:
    """Answers the edge. A sandbox that runs is found without the store."""

    def __init__(
        self, *, store: Store, node: NodeClient, lifecycle: Lifecycle, mint: TokenMint
    ) -> None:
        self._store = store
        self._node = node
        self._lifecycle = lifecycle
        self._mint = mint
        self._resumes: dict[str, asyncio.Task[Connected]] = {}
        self._searching = asyncio.Lock()

    async def find(
        self,
        sandbox_id: str,
        *,
        port: int | None,
        access_token: str | None,
        traffic_token: str | None,
    ) -> Route:
        """How to reach a sandbox. One that wakes by traffic is resumed first.

        Args:
            sandbox_id: Which.
            port: What the request is for. None counts as the agent's.
            access_token: As the request brought it. Needed to wake a sandbox by the agent's port.
            traffic_token: The same for user ports that are not public.

        Raises:
            SandboxNotFound: unknown or ended.
            StateConflict: it does not run, and traffic does not wake it.
            Unauthenticated, Forbidden: it is paused, and the request must not wake it.
            QuotaExceeded, NodeFull, SnapshotIncompatible, SnapshotDamaged, ResumeFailed:
                it stays paused.
        """
        for _ in range(ROUTE_TRIES):
            try:
                return await self._node.route(sandbox_id)
            except StateConflict as exc:
                if exc.details.get("state") != State.PAUSED:
                    raise
                conflict = exc
            record = await self._waking(sandbox_id, conflict)
            self._check_tokens(record, port, access_token, traffic_token)
            await self._wake(record)
        raise conflict

    async def find_by_signature(
        self, *, path: str, operation: str, username: str, signature: str, expiration: str | None
    ) -> Route:
        """The sandbox whose access token made a signed file URL. The signature is proof enough
        to wake it.

        Raises:
            SandboxNotFound: no running or waking sandbox's token fits, or the URL has expired.
            As ``find``.
        """
        try:
            return await self._node.route_by_signature(
                path=path,
                operation=operation,
                username=username,
                signature=signature,
                expiration=expiration,
            )
        except SandboxNotFound:
            if _expired(expiration):
                raise
            sandbox_id = await self._signer(path, operation, username, signature, expiration)
            if sandbox_id is None:
                raise
        return await self.find(
            sandbox_id,
            port=AGENT_PORT,
            access_token=self._mint.access(sandbox_id),
            traffic_token=None,
        )

    async def _signer(
        self, path: str, operation: str, username: str, signature: str, expiration: str | None
    ) -> str | None:
        def search(sandbox_ids: list[str]) -> str | None:
            for sandbox_id in sandbox_ids:
                token = self._mint.access(sandbox_id)
                made = file_signature(path, operation, username, token, expiration)
                if hmac.compare_digest(made.encode(), signature.encode()):
                    return sandbox_id
            return None

        # One at a time, and not on the event loop: anybody can send signatures that fit nothing.
        async with self._searching:
            return await asyncio.to_thread(search, await sandboxes.ids_to_wake(self._store))

    async def console(self, sandbox_id: str, kind: ConsoleKind, access_token: str | None) -> str:
        """Path of the socket of a running sandbox's console or screen, for its access token.

        Raises:
            Unauthenticated: the token is missing or wrong, or there is no such sandbox.
            StateConflict: it does not run now.
            NotSupported: its backend has none.
        """
        # The token is the sandbox's by its id alone: so nobody learns which sandboxes exist.
        if not _fits(access_token, self._mint.access(sandbox_id)):
            raise Unauthenticated(
                "the sandbox's access token is missing or wrong",
                remediation="Send X-Access-Token with the token that the create call returned.",
            )
        return await self._node.console(sandbox_id, kind)

    async def _waking(self, sandbox_id: str, conflict: StateConflict) -> SandboxRecord:
        record = await sandboxes.get_sandbox(self._store, sandbox_id)
        if record is None or record.terminal:
            raise SandboxNotFound("there is no such sandbox")
        if not record.auto_resume:
            raise conflict
        # Without memory it would reboot: too much for a request that may come from anybody.
        status = await self._node.get(sandbox_id)
        if status.pause_mode == "filesystem":
            raise conflict
        return record

    def _check_tokens(
        self,
        record: SandboxRecord,
        port: int | None,
        access_token: str | None,
        traffic_token: str | None,
    ) -> None:
        if port is None or port == AGENT_PORT:
            if not _fits(access_token, self._mint.access(record.sandbox_id)):
                raise Unauthenticated(
                    "the sandbox is paused, and is resumed only with its access token",
                    remediation="Send X-Access-Token, or resume it by the API.",
                )
        elif not record.network.allow_public_traffic and not _fits(
            traffic_token, self._mint.traffic(record.sandbox_id)
        ):
            raise Forbidden(
                "the sandbox is paused, and is resumed only with its traffic token",
                remediation="Send E2B-Traffic-Access-Token, or resume it by the API.",
            )

    async def _wake(self, record: SandboxRecord) -> None:
        """Requests that come meanwhile share one resume."""
        task = self._resumes.get(record.sandbox_id)
        if task is None:
            timeout_s = max(record.timeout_s, AUTO_RESUME_TIMEOUT_S_MIN)
            task = asyncio.create_task(
                self._lifecycle.resume(record, timeout_s), name="auto-resume"
            )
            self._resumes[record.sandbox_id] = task
            task.add_done_callback(lambda done: self._woken(record.sandbox_id, done))
        await asyncio.shield(task)

    def _woken(self, sandbox_id: str, task: asyncio.Task[Connected]) -> None:
        del self._resumes[sandbox_id]
        if not task.cancelled():
            failure = task.exception()
            log.info(
                "sandbox woken by traffic",
                sandbox_id=sandbox_id,
                outcome="ok" if failure is None else repr(failure),
            )


def _fits(given: str | None, wanted: str) -> bool:
    return given is not None and hmac.compare_digest(given.encode(), wanted.encode())


def _expired(expiration: str | None) -> bool:
    if expiration is None:
        return False
    # As the agent reads it: anything that is no number has expired.
    if not (expiration.isascii() and expiration.isdigit() and len(expiration) <= TIME_DIGITS_MAX):
        return True
    return int(expiration) <= time.time()
