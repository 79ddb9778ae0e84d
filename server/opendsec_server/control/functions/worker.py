# SPDX-License-Identifier: AGPL-3.0-only
"""One worker: a sandbox in which our front runs, and one call at a time."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from importlib import resources
from typing import Any

import msgspec
import structlog

from opendsec_server.contract.errors import (
    AgentUnresponsive,
    FunctionPoolUnusable,
    FunctionWorkerLost,
    InvalidRequest,
    OpendsecError,
    SandboxNotFound,
    StateConflict,
)
from opendsec_server.contract.node import NetworkPolicy, NodeClient
from opendsec_server.contract.states import EndReason
from opendsec_server.control.creates import Creates
from opendsec_server.control.iam import Caller
from opendsec_server.control.params import CreateParams
from opendsec_server.store.functions import PoolRecord, PoolSpec, worker_key

from . import results
from .link import Link
from .model import RESULT_BYTES_MAX, Code, Limits, Outcome

log = structlog.get_logger(__name__)

POOL_MARK = "opendsec.function_pool"
"""Metadata of workers' sandboxes: the pool's name."""
LEASE_S = 600
"""A worker whose server is gone ends after so long; while it lives, its end is put off."""
LIFE_S_MAX = 24 * 3_600.0
BOOT_S = 120.0
"""For the front, and the imports in advance."""
GRACE_S = 30.0
"""A worker that says nothing for so long after a call's time-out is lost."""
SCRUB_S = 30.0
THREAD_BYTES = 256 * 1024
CODES_KNOWN = 8
_NO_PROGRAM = ("No such file", "not found", "cannot run")

_heads = msgspec.json.Decoder(dict[str, Any])


def _program(name: str) -> str:
    return resources.files(__package__).joinpath("guest", f"{name}.py").read_text()


FRONT, ZYGOTE = _program("front"), _program("zygote")


class Worker:
    """See the module. Made by ``start``; ended by ``end``, whatever happened before."""

    def __init__(self, *, worker_id: str, node: NodeClient, spec: PoolSpec) -> None:
        self.worker_id = worker_id
        self.spec = spec
        self.sandbox_id: str | None = None
        self.python = ""
        self.calls = 0
        self.started_at = time.monotonic()
        self.idle_since = self.started_at
        self._node = node
        self._asked_for = False
        self._link: Link | None = None
        self._codes: list[str] = []
        self._watching: asyncio.Task[None] | None = None
        self._port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._evidence: dict[str, Any] = {}

    async def start(self, caller: Caller, pool: PoolRecord, creates: Creates) -> None:
        """Make the sandbox, and bring it to where it can take calls.

        Raises:
            FunctionPoolUnusable: there is no Python, or an import fails.
            FunctionWorkerLost: it went away before it was ready.
            OpendsecError: as a create.
        """
        spec = self.spec
        params = CreateParams(
            template=spec.template,
            backend=spec.backend,
            cpu=spec.cpu,
            memory_mb=spec.memory_mb,
            disk_mb=spec.disk_mb,
            env=spec.env,
            metadata={POOL_MARK: pool.name},
            timeout_s=LEASE_S,
            network=NetworkPolicy(internet=spec.internet, allow_public_traffic=False),
        )
        self._asked_for = True
        created = await creates.create(caller, params, key=worker_key(self.worker_id))
        self.sandbox_id = created.record.sandbox_id
        secret = secrets.token_hex(32)
        self._watching = asyncio.create_task(self._watch(secret), name="function-worker")
        async with asyncio.timeout(BOOT_S):
            port = await asyncio.shield(self._port)
        self._link = await Link.open(await self._node.route(self.sandbox_id), port, secret)
        config = {"modules": spec.modules, "preload": list(spec.preload), "env": {}}
        self._link.send({"zygote": ZYGOTE}, msgspec.json.encode(config))
        head, _ = await self._link.receive(BOOT_S)
        if "failed" in head:
            raise FunctionPoolUnusable(
                f"a worker cannot start: {str(head['failed'])[:2_000]}",
                details={"pool": pool.name, "template": spec.template},
            )
        self.python = str(head.get("python", ""))
        self.idle_since = time.monotonic()

    async def _watch(self, secret: str) -> None:
        """The front's own process, from its start to its end."""
        assert self.sandbox_id is not None
        text = b""
        try:
            async for event in self._node.exec(
                self.sandbox_id,
                ("python3", "-I", "-u", "-c", FRONT),
                user="root",
                workdir="/",
                env={"OPENDSEC_FN_SECRET": secret},
                timeout_s=LIFE_S_MAX,
            ):
                if event.kind == "end":
                    self._evidence = {"exit_code": event.exit_code, "signal": event.signal}
                elif len(text) < 4_096:
                    text += event.data
                    if event.kind == "stdout":
                        self._hear(text)
        except OpendsecError as exc:
            self._fail(self._as_boot_error(exc))
            self._evidence = {"because": exc.message}
        self._fail(FunctionPoolUnusable(
            "Python ended before the worker was ready: "
            + (text.decode(errors="replace").strip()[-1_000:] or str(self._evidence))
        ))  # fmt: skip

    def _hear(self, text: bytes) -> None:
        line, newline, _ = text.partition(b"\n")
        if not newline or self._port.done():
            return
        with contextlib.suppress(msgspec.DecodeError):
            port = _heads.decode(line).get("port")
            if isinstance(port, int):
                self._port.set_result(port)

    def _fail(self, error: OpendsecError) -> None:
        if not self._port.done():
            self._port.set_exception(error)
            self._port.exception()  # Taken: nobody may wait for it any more.

    def _as_boot_error(self, exc: OpendsecError) -> OpendsecError:
        if isinstance(exc, InvalidRequest):
            return FunctionPoolUnusable(
                f"template `{self.spec.template}` cannot run a worker: {exc.message}",
                details={"template": self.spec.template},
            )
        if isinstance(exc, (AgentUnresponsive, SandboxNotFound, StateConflict)):
            return FunctionWorkerLost(f"the worker went away: {exc.message}")
        return exc

    async def call(self, code: Code, item: bytes, limits: Limits) -> Outcome:
        """Make one call. Afterwards ``settle`` before the next one.

        Raises:
            FunctionWorkerLost: it ended meanwhile; what the call did is not known.
        """
        assert self._link is not None
        assert self.sandbox_id is not None
        self.calls += 1
        sends = code.digest not in self._codes
        if sends:
            # As the front does: it forgets all when it has so many.
            if len(self._codes) >= CODES_KNOWN:
                self._codes.clear()
            self._codes.append(code.digest)
        text = code.text if sends else b""
        head = {
            "code": code.digest,
            "code_bytes": len(text),
            "timeout_s": limits.timeout_s,
            "memory": None if limits.memory_mb is None else limits.memory_mb * 1024 * 1024,
            "processes": limits.processes,
            "result_max": RESULT_BYTES_MAX,
            "stdout_max": limits.output_bytes,
            "stderr_max": limits.output_bytes,
        }
        self._link.send(head, text, item)
        try:
            said, body = await self._link.receive(limits.timeout_s + GRACE_S)
            if "unclean" in said:
                # Its own end was seen by the front, but not that of what it started.
                raise FunctionWorkerLost(f"the worker gave up: {said['unclean']}")
            report = msgspec.convert(said, results.Report)
        except msgspec.ValidationError as exc:
            raise FunctionWorkerLost(f"the worker's answer makes no sense: {exc}") from exc
        except FunctionWorkerLost as exc:
            await self._gather_evidence()
            exc.details = {**exc.details, **self._evidence, "sandbox_id": self.sandbox_id}
            raise
        if len(body) > THREAD_BYTES:
            # Reading it takes a while, and others wait on the event loop.
            return await asyncio.to_thread(
                results.outcome_of, report, body, limits, self.sandbox_id
            )
        return results.outcome_of(report, body, limits, self.sandbox_id)

    async def settle(self) -> bool:
        """Wait for the scrub. False: the worker must be replaced."""
        assert self._link is not None
        try:
            head, _ = await self._link.receive(SCRUB_S)
        except FunctionWorkerLost:
            return False
        if "unclean" in head:
            log.info("worker not clean", sandbox_id=self.sandbox_id, why=str(head["unclean"])[:500])
            return False
        self.idle_since = time.monotonic()
        young = self.idle_since - self.started_at < LIFE_S_MAX / 2
        return "idle" in head and young and self.calls < self.spec.calls_max

    @property
    def alive(self) -> bool:
        """Whether its front still runs, as far as is known."""
        return self._watching is not None and not self._watching.done()

    def cancel(self) -> None:
        """Have the call that runs killed."""
        if self._link is not None:
            with contextlib.suppress(OSError, RuntimeError):
                self._link.send({"cancel": True})

    async def prolong(self) -> bool:
        """Put the worker's end off. False: it is gone."""
        assert self.sandbox_id is not None
        try:
            await self._node.set_end_at(self.sandbox_id, time.time() + LEASE_S, only_extend=True)
        except SandboxNotFound:
            return False
        except OpendsecError as exc:
            log.warning("worker not prolonged", sandbox_id=self.sandbox_id, why=exc.message)
        return self.alive

    async def end(self) -> bool:
        """End its sandbox. False: the node could not be asked, or it is not known whether there is
        one; it is tried again later."""
        if self._link is not None:
            self._link.close()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self.sandbox_id is None:
            return not self._asked_for
        return await end_sandbox(self._node, self.sandbox_id)

    async def _gather_evidence(self) -> None:
        if self._watching is not None:
            await asyncio.wait({self._watching}, timeout=1.0)


async def end_sandbox(node: NodeClient, sandbox_id: str) -> bool:
    """End a worker's sandbox. False: the node could not be asked."""
    try:
        await node.kill(sandbox_id, EndReason.KILLED)
    except SandboxNotFound:
        pass
    except OpendsecError as exc:
        log.warning("worker not ended", sandbox_id=sandbox_id, why=exc.message)
        return False
    return True
