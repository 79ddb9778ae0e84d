# SPDX-License-Identifier: AGPL-3.0-only
"""A node over HTTP (see ``contract.node_wire``)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from opendsec_server.contract import node_wire as wire
from opendsec_server.contract.actions import KeptProgram, ProgramOrder
from opendsec_server.contract.errors import (
    InvalidRequest,
    NodeUnavailable,
    NotSupported,
    OpendsecError,
)
from opendsec_server.contract.images import (
    ExecEvent,
    ImageConfig,
    ImageInfo,
    ImageInfos,
    PackOptions,
    PruneReport,
    PullProgresses,
    RegistryAuth,
)
from opendsec_server.contract.node import (
    ConsoleKind,
    MetricSamples,
    NetworkPolicy,
    NodeEvent,
    NodeInfo,
    PauseReport,
    Route,
    SandboxSpec,
    SandboxStatus,
    SandboxUsage,
    Snapshot,
    Snapshots,
    StateMode,
)
from opendsec_server.contract.states import EndReason

from .connection import Address, Connection, Connections

Line = TypeVar("Line", wire.ExecLine, wire.EventLine, wire.CreateLine)

ONCE = frozenset({"pause", "pack", "start_kept", "snapshot", "write_file"})
"""Calls that must not be sent a second time: they get a connection of their own, of which it is
certain that the node has not just let go."""
ARCHIVE_PIECE_BYTES = 1_048_576


class HttpNode:
    """Implements ``NodeClient`` over HTTP.

    Args:
        url: ``http(s)://host:port`` or ``unix:/path``.
        secret: What node and gateway share.
        tls: For https: whom to trust.
    """

    def __init__(self, url: str, secret: bytes, tls: ssl.SSLContext | None = None) -> None:
        self._connections = Connections(Address(url, tls), secret)
        self._images = HttpImages(self)
        self._waiting: list[tuple[SandboxSpec, asyncio.Future[SandboxStatus]]] = []
        self._sending: set[asyncio.Task[None]] = set()

    @property
    def images(self) -> HttpImages:
        """See ``NodeClient.images``."""
        return self._images

    async def close(self) -> None:
        """End its connections."""
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        self._connections.close()

    async def call(self, name: str, /, **arguments: Any) -> Any:
        """One plain call.

        Raises:
            NodeNotReached: the node has seen nothing of it.
            NodeUnavailable: what became of it is not known.
            OpendsecError: the node's own.
        """
        call = wire.CALLS[name]
        body = wire.encode(call.arguments(**arguments))
        if name != wire.INFO:
            await self._meet()
        async with self._connections.exchange(name, body, fresh=name in ONCE) as connection:
            answer = await self._answer(connection)
        return _result(name, call.decode_answer, answer)

    async def _meet(self) -> None:
        """Learn whom requests are for: no other node may be made to heed them."""
        if not self._connections.node_id:
            await self.info()

    async def _answer(self, connection: Connection) -> bytes:
        answer = b""
        async for line in self._connections.lines(connection):
            answer = line
        return answer

    async def _lines(
        self, name: str, body: bytes, decode: Callable[[bytes], Line]
    ) -> AsyncIterator[Line]:
        """The lines of a stream.

        Raises:
            As ``call``.
        """
        await self._meet()
        async with self._connections.exchange(name, body, fresh=True) as connection:
            async for line in self._connections.lines(connection):
                try:
                    yield decode(line)
                except msgspec.DecodeError as exc:
                    raise NodeUnavailable(f"the node's answer cannot be read: {exc}") from exc

    # --- creates ------------------------------------------------------------

    async def create(self, spec: SandboxSpec) -> SandboxStatus:
        """See ``NodeClient.create``. Those asked for at the same moment go in one request."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[SandboxStatus] = loop.create_future()
        self._waiting.append((spec, future))
        if len(self._waiting) == 1:
            loop.call_soon(self._send)
        return await future

    def _send(self) -> None:
        while self._waiting:
            some = self._waiting[: wire.CREATES_MAX]
            del self._waiting[: wire.CREATES_MAX]
            task = asyncio.create_task(self._create(some), name="creates")
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _create(
        self, wanted: Sequence[tuple[SandboxSpec, asyncio.Future[SandboxStatus]]]
    ) -> None:
        failure: OpendsecError = NodeUnavailable("the node did not say what became of the create")
        try:
            await self._meet()
            body = wire.encode([spec for spec, _ in wanted])
            async with self._connections.exchange(wire.CREATES, body) as connection:
                async for line in self._connections.lines(connection):
                    _settle(wanted, line)
        except OpendsecError as exc:
            failure = exc
        except msgspec.DecodeError as exc:
            failure = NodeUnavailable(f"the node's answer cannot be read: {exc}")
        finally:
            for _, future in wanted:
                if not future.done():
                    future.set_exception(failure)

    # --- plain calls --------------------------------------------------------

    async def info(self) -> NodeInfo:
        """See ``NodeClient.info``."""
        info = cast(NodeInfo, await self.call(wire.INFO))
        # That of the first time: another node at the address does not get what is this one's.
        self._connections.node_id = self._connections.node_id or info.node_id
        return info

    async def set_marks(
        self, *, labels: dict[str, str] | None = None, draining: bool | None = None
    ) -> NodeInfo:
        """See ``NodeClient.set_marks``."""
        answer = await self.call("set_marks", labels=labels, draining=draining)
        return cast(NodeInfo, answer)

    async def get(self, sandbox_id: str) -> SandboxStatus:
        """See ``NodeClient.get``."""
        return cast(SandboxStatus, await self.call("get", sandbox_id=sandbox_id))

    async def list(self) -> list[SandboxStatus]:
        """See ``NodeClient.list``."""
        return cast("list[SandboxStatus]", await self.call("list"))

    async def kill(self, sandbox_id: str, reason: EndReason = EndReason.KILLED) -> SandboxStatus:
        """See ``NodeClient.kill``."""
        answer = await self.call("kill", sandbox_id=sandbox_id, reason=reason)
        return cast(SandboxStatus, answer)

    async def pause(self, sandbox_id: str, mode: StateMode = "full") -> PauseReport:
        """See ``NodeClient.pause``."""
        return cast(PauseReport, await self.call("pause", sandbox_id=sandbox_id, mode=mode))

    async def resume(
        self, sandbox_id: str, *, end_at: float, reboot: bool = False
    ) -> SandboxStatus:
        """See ``NodeClient.resume``."""
        answer = await self.call("resume", sandbox_id=sandbox_id, end_at=end_at, reboot=reboot)
        return cast(SandboxStatus, answer)

    async def snapshot(
        self,
        sandbox_id: str,
        snapshot_id: str,
        *,
        mode: StateMode = "full",
        ephemeral: bool = False,
    ) -> Snapshot:
        """See ``NodeClient.snapshot``."""
        answer = await self.call(
            "snapshot",
            sandbox_id=sandbox_id,
            snapshot_id=snapshot_id,
            mode=mode,
            ephemeral=ephemeral,
        )
        return cast(Snapshot, answer)

    async def start_kept(self, sandbox_id: str, tag: str, order: ProgramOrder) -> None:
        """See ``NodeClient.start_kept``."""
        await self.call("start_kept", sandbox_id=sandbox_id, tag=tag, order=order)

    async def kept(
        self, sandbox_id: str, tag: str, *, wait_s: float = 0.0, void: bool = False
    ) -> KeptProgram:
        """See ``NodeClient.kept``."""
        answer = await self.call("kept", sandbox_id=sandbox_id, tag=tag, wait_s=wait_s, void=void)
        return cast(KeptProgram, answer)

    async def forget_kept(self, sandbox_id: str, tag: str) -> None:
        """See ``NodeClient.forget_kept``."""
        await self.call("forget_kept", sandbox_id=sandbox_id, tag=tag)

    async def write_file(
        self, sandbox_id: str, path: str, data: bytes, *, user: str | None = None
    ) -> None:
        """See ``NodeClient.write_file``."""
        await self.call("write_file", sandbox_id=sandbox_id, path=path, data=data, user=user)

    async def read_file(
        self, sandbox_id: str, path: str, *, user: str | None = None, bytes_max: int
    ) -> bytes:
        """See ``NodeClient.read_file``."""
        answer = await self.call(
            "read_file", sandbox_id=sandbox_id, path=path, user=user, bytes_max=bytes_max
        )
        return cast(bytes, answer)

    async def pack(self, sandbox_id: str, options: PackOptions) -> ImageInfo:
        """See ``NodeClient.pack``."""
        return cast(ImageInfo, await self.call("pack", sandbox_id=sandbox_id, options=options))

    async def snapshots(self) -> Snapshots:
        """See ``NodeClient.snapshots``."""
        return cast(Snapshots, await self.call("snapshots"))

    async def delete_snapshot(self, snapshot_id: str) -> bool:
        """See ``NodeClient.delete_snapshot``."""
        return cast(bool, await self.call("delete_snapshot", snapshot_id=snapshot_id))

    async def set_end_at(
        self, sandbox_id: str, end_at: float, *, only_extend: bool = False
    ) -> SandboxStatus:
        """See ``NodeClient.set_end_at``."""
        answer = await self.call(
            "set_end_at", sandbox_id=sandbox_id, end_at=end_at, only_extend=only_extend
        )
        return cast(SandboxStatus, answer)

    async def set_network(self, sandbox_id: str, policy: NetworkPolicy) -> None:
        """See ``NodeClient.set_network``."""
        await self.call("set_network", sandbox_id=sandbox_id, policy=policy)

    async def route(self, sandbox_id: str) -> Route:
        """See ``NodeClient.route``."""
        return cast(Route, await self.call("route", sandbox_id=sandbox_id))

    async def console(self, sandbox_id: str, kind: ConsoleKind) -> str:
        """See ``NodeClient.console``. Not over a network: it is a socket of the node's machine."""
        raise NotSupported(
            "consoles of sandboxes on another machine cannot be reached through the gateway",
            remediation="Use the console on the node's own machine.",
        )

    async def console_tail(self, sandbox_id: str) -> str:
        """See ``NodeClient.console_tail``."""
        return cast(str, await self.call("console_tail", sandbox_id=sandbox_id))

    async def route_by_signature(
        self, *, path: str, operation: str, username: str, signature: str, expiration: str | None
    ) -> Route:
        """See ``NodeClient.route_by_signature``."""
        answer = await self.call(
            "route_by_signature",
            path=path,
            operation=operation,
            username=username,
            signature=signature,
            expiration=expiration,
        )
        return cast(Route, answer)

    async def metrics(self, sandbox_id: str, start: float, end: float) -> MetricSamples:
        """See ``NodeClient.metrics``."""
        answer = await self.call("metrics", sandbox_id=sandbox_id, start=start, end=end)
        return cast(MetricSamples, answer)

    async def usage(self, sandbox_ids: Sequence[str]) -> dict[str, SandboxUsage]:
        """See ``NodeClient.usage``."""
        answer = await self.call("usage", sandbox_ids=list_of(sandbox_ids))
        return cast("dict[str, SandboxUsage]", answer)

    # --- streams and files --------------------------------------------------

    async def exec(
        self,
        sandbox_id: str,
        argv: tuple[str, ...],
        *,
        user: str | None = None,
        workdir: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float,
    ) -> AsyncIterator[ExecEvent]:
        """See ``NodeClient.exec``."""
        body = wire.encode(
            wire.EXEC_CALL.arguments(
                sandbox_id=sandbox_id,
                argv=argv,
                user=user,
                workdir=workdir,
                env=env,
                timeout_s=timeout_s,
            )
        )
        lines = self._lines(wire.EXEC, body, wire.decode_exec_line)
        async with contextlib.aclosing(lines):  # type: ignore[type-var]
            async for line in lines:
                if line.error is not None:
                    raise wire.from_wire(line.error)
                if line.ok is not None:
                    yield line.ok
                    if line.ok.kind == "end":
                        return
        raise NodeUnavailable("the node did not say what became of the program")

    async def events(self) -> AsyncIterator[NodeEvent]:
        """See ``NodeClient.events``. Ends with the connection."""
        lines = self._lines(wire.EVENTS, b"{}", wire.decode_event_line)
        async with contextlib.aclosing(lines):  # type: ignore[type-var]
            async for line in lines:
                if line.error is not None:
                    raise wire.from_wire(line.error)
                if line.ok is not None:
                    yield line.ok

    async def unpack(
        self,
        sandbox_id: str,
        archive: str,
        *,
        sources: Sequence[str],
        target: str,
        user: str,
        mode: int | None,
    ) -> None:
        """See ``NodeClient.unpack``. The archive lies here, and is sent."""
        arguments = wire.UNPACK_CALL.arguments(
            sandbox_id=sandbox_id,
            archive="",
            sources=list_of(sources),
            target=target,
            user=user,
            mode=mode,
        )
        text = base64.b64encode(wire.encode(arguments)).decode()
        await self._meet()
        async with self._connections.exchange(
            wire.UNPACK, _file(Path(archive)), arguments=text, fresh=True
        ) as connection:
            answer = await self._answer(connection)
        _result(wire.UNPACK, wire.UNPACK_CALL.decode_answer, answer)


class HttpImages:
    """Implements ``NodeImages`` over HTTP."""

    def __init__(self, node: HttpNode) -> None:
        self._node = node

    async def pull(
        self, reference: str, *, auth: RegistryAuth | None = None, refresh: bool = True
    ) -> ImageInfo:
        """See ``NodeImages.pull``."""
        answer = await self._node.call(
            "images.pull", reference=reference, auth=auth, refresh=refresh
        )
        return cast(ImageInfo, answer)

    async def compose(
        self, parts: Sequence[str], *, config: ImageConfig | None = None
    ) -> ImageInfo:
        """See ``NodeImages.compose``."""
        answer = await self._node.call("images.compose", parts=list_of(parts), config=config)
        return cast(ImageInfo, answer)

    async def all(self) -> ImageInfos:
        """See ``NodeImages.all``."""
        return cast(ImageInfos, await self._node.call("images.all"))

    async def get(self, name: str) -> ImageInfo:
        """See ``NodeImages.get``."""
        return cast(ImageInfo, await self._node.call("images.get", name=name))

    async def remove(self, name: str) -> None:
        """See ``NodeImages.remove``."""
        await self._node.call("images.remove", name=name)

    async def prune(self, *, unused_for_s: float = 0.0, keep: Sequence[str] = ()) -> PruneReport:
        """See ``NodeImages.prune``."""
        answer = await self._node.call(
            "images.prune", unused_for_s=unused_for_s, keep=list_of(keep)
        )
        return cast(PruneReport, answer)

    async def keep(self, digests: Sequence[str]) -> None:
        """See ``NodeImages.keep``."""
        await self._node.call("images.keep", digests=list_of(digests))

    async def progress(self) -> PullProgresses:
        """See ``NodeImages.progress``."""
        return cast(PullProgresses, await self._node.call("images.progress"))

    async def push(self, name: str, reference: str, *, auth: RegistryAuth | None = None) -> str:
        """See ``NodeImages.push``."""
        answer = await self._node.call("images.push", name=name, reference=reference, auth=auth)
        return cast(str, answer)


def list_of(items: Sequence[str]) -> list[str]:
    """A list for the wire."""
    return list(items)


def _result(name: str, decode: Callable[[bytes], Any], answer: bytes) -> Any:
    try:
        found = decode(answer)
    except msgspec.DecodeError as exc:
        raise NodeUnavailable(f"the node's answer to {name} cannot be read: {exc}") from exc
    if found.error is not None:
        raise wire.from_wire(found.error)
    return found.ok


def _settle(
    wanted: Sequence[tuple[SandboxSpec, asyncio.Future[SandboxStatus]]], line: bytes
) -> None:
    told = wire.decode_create_line(line)
    if told.n < 0 and told.error is not None:
        raise wire.from_wire(told.error)
    if not 0 <= told.n < len(wanted):
        raise NodeUnavailable("the node's answer names a create that was not asked for")
    future = wanted[told.n][1]
    if future.done():
        return
    if told.ok is not None:
        future.set_result(told.ok)
    elif told.error is not None:
        future.set_exception(wire.from_wire(told.error))


async def _file(path: Path) -> AsyncIterator[bytes]:
    try:
        file = await asyncio.to_thread(path.open, "rb")
    except OSError as exc:
        raise InvalidRequest(f"the archive cannot be read: {exc.strerror}") from exc
    with contextlib.closing(file):
        while piece := await asyncio.to_thread(file.read, ARCHIVE_PIECE_BYTES):
            yield piece
