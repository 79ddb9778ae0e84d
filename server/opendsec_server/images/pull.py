# SPDX-License-Identifier: AGPL-3.0-only
"""Pulls: from a reference to an image in the store.

Each layer is fetched, unpacked and made an EROFS file on its own, several side by side, and is in
the store as soon as it is done: a pull that is repeated after a failure goes on from there. An
image appears when all of its layers are in the store, in one step.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import structlog

from opendsec_server.config import Config
from opendsec_server.contract.errors import (
    ImageDamaged,
    Internal,
    NodeFull,
    OpendsecError,
    RegistryLimited,
    RegistryUnavailable,
)
from opendsec_server.contract.images import LAYERS_MAX, ImageConfig, RegistryAuth

from . import auth as credentials
from . import convert, limits, manifests, registry, skopeo
from .collapse import collapse
from .flights import Flights
from .references import Reference
from .registry import Endpoint, is_loopback
from .room import Room
from .store import Hold, Image, ImageStore

log = structlog.get_logger("opendsec.images")

T = TypeVar("T")
_MIB = 1024 * 1024
_BROKEN_PIPE = "broken pipe"


@dataclass(slots=True)
class Progress:
    """How far a pull is. The bytes are those of the registry's blobs."""

    reference: str
    layers: int = 0
    layers_done: int = 0
    bytes_total: int = 0
    bytes_read: dict[str, int] = field(default_factory=dict)


class _Source:
    """Where one attempt reads from: proxies that have the image open, made as they are needed.

    A proxy sends one layer at a time.

    Args:
        what: The image, for people.
        image: Skopeo's name of it, which means the same each time.
        open_proxy: Runs another proxy.
        explain: The error that skopeo's words mean.
    """

    def __init__(
        self,
        what: str,
        image: str,
        open_proxy: Callable[[], AbstractAsyncContextManager[skopeo.Proxy]],
        explain: Callable[[str], Awaitable[OpendsecError]],
    ) -> None:
        self.what = what
        self.explain = explain
        self._image = image
        self._open_proxy = open_proxy
        self._free: list[tuple[skopeo.Proxy, int]] = []
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> _Source:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._stack.aclose()

    async def begin(
        self, look: Callable[[], Awaitable[OpendsecError | None]]
    ) -> tuple[str, bytes, bytes]:
        """Open the image: digest of its manifest, manifest and configuration."""

        async def ask() -> tuple[str, bytes, bytes]:
            proxy = await self._stack.enter_async_context(self._open_proxy())
            opened = await proxy.open(self._image, limits.MANIFEST_TIMEOUT_S)
            self._free.append((proxy, opened))
            digest, manifest = await proxy.manifest(opened, limits.MANIFEST_TIMEOUT_S)
            return digest, manifest, await proxy.config(opened, limits.MANIFEST_TIMEOUT_S)

        return await _answered(ask, self.explain, look)

    @contextlib.asynccontextmanager
    async def line(self) -> AsyncIterator[tuple[skopeo.Proxy, int]]:
        """A proxy that nobody else uses meanwhile. After a failure it is not used again."""
        if self._free:
            proxy, opened = self._free.pop()
        else:
            proxy = await self._stack.enter_async_context(self._open_proxy())
            opened = await proxy.open(self._image, limits.MANIFEST_TIMEOUT_S)
        try:
            yield proxy, opened
        except BaseException:
            proxy.kill()
            raise
        self._free.append((proxy, opened))


@dataclass(frozen=True, slots=True)
class _Job:
    """What one attempt to have an image works with: where from, what it holds, how far it is."""

    source: _Source
    hold: Hold
    progress: Progress
    budget: _Budget


class Puller:
    """Pulls images into a store.

    Args:
        store: Where they go.
        config: Registries, limits.
        room: Makes room.
    """

    def __init__(self, store: ImageStore, config: Config, room: Room) -> None:
        self._store = store
        self._config = config
        self._room = room
        self._pulls: Flights[Image] = Flights()
        self._layers: Flights[None] = Flights()
        self._fetching = asyncio.Semaphore(limits.LAYERS_AT_ONCE)
        self._making = asyncio.Semaphore(os.cpu_count() or 1)
        self.running: dict[str, Progress] = {}
        """Pulls at work, by reference."""

    async def pull(self, reference: Reference, auth: RegistryAuth | None = None) -> Image:
        """Have the image that a reference means now. Those who ask for the same with the same
        credentials share one pull.

        Raises:
            As ``contract.images.NodeImages.pull``.
        """
        key = (str(reference), auth and (auth.username, auth.password))
        return await self._pulls.join(key, lambda: self._from_registry(reference, auth))

    async def _from_registry(self, reference: Reference, auth: RegistryAuth | None) -> Image:
        mirrors = self._config.registry_mirrors.get(reference.host, ())
        for host in mirrors:
            try:
                # The request's credentials are for the registry itself, and nobody else's to see.
                return await self._with_retries(self._endpoint(host), reference, None)
            except ImageDamaged:
                raise
            except OpendsecError as exc:
                log.warning("registry_mirror_failed", mirror=host, error=exc.message)
        return await self._with_retries(self._endpoint(reference.host), reference, auth)

    def _endpoint(self, host: str) -> Endpoint:
        return Endpoint(host, is_loopback(host) or host in self._config.insecure_registries)

    async def _with_retries(
        self, endpoint: Endpoint, reference: Reference, auth: RegistryAuth | None
    ) -> Image:
        pause_s = limits.RETRY_PAUSE_S
        for attempt in range(1, limits.ATTEMPTS_MAX + 1):
            try:
                return await self._attempt(endpoint, reference, auth)
            except RegistryUnavailable as exc:
                if attempt == limits.ATTEMPTS_MAX:
                    raise
                log.info("pull_retried", reference=str(reference), error=exc.message)
            await asyncio.sleep(pause_s)
            pause_s *= 2
        raise AssertionError("unreachable")

    async def _attempt(
        self, endpoint: Endpoint, reference: Reference, auth: RegistryAuth | None
    ) -> Image:
        node_file = credentials.auth_file_of(self._config.registry_auth_file)
        known = credentials.known(endpoint.host, auth, node_file)

        async def explain(text: str) -> OpendsecError:
            return await registry.explain(endpoint, reference, known, text)

        async def look() -> OpendsecError | None:
            return await registry.probe(endpoint, reference, known)

        with credentials.for_skopeo(endpoint.host, auth, node_file) as options:
            arguments = options.arguments
            if endpoint.insecure:
                arguments += ("--tls-verify=false",)
            return await self._by_proxy(
                reference.at(endpoint.host), str(reference), arguments, options.fds, explain, look
            )

    async def import_from(self, image: str, name: str) -> Image:
        """Take in an image from files of this machine, by skopeo's name of it (``oci:…``)."""

        async def explain(text: str) -> OpendsecError:
            return registry.from_text(text, name) or ImageDamaged(f"{name}: {text.strip()[-500:]}")

        async def look() -> OpendsecError | None:
            return None

        return await self._pulls.join(
            (image, None), lambda: self._by_proxy(image, name, (), (), explain, look)
        )

    async def import_tar(self, file: Path, name: str) -> Image:
        """Take in a tar of a root file system as an image of one layer."""
        bytes_max = self._config.image_size_max_mb * _MIB
        await self._room.make((await asyncio.to_thread(file.stat)).st_size)
        with self._store.holding() as hold, self._store.scratch("tar") as scratch:
            tree = scratch / "tree"
            tree.mkdir()
            unpacked = await convert.unpack(
                tree, source=file, bytes_max=bytes_max,
                stall_s=self._config.registry_stall_s,
            )  # fmt: skip
            await self._make(tree, scratch / "layer", hold, unpacked)
            return await asyncio.to_thread(
                self._store.put, hold.layers, ImageConfig(), names=[name]
            )

    async def _by_proxy(
        self,
        image: str,
        name: str,
        arguments: tuple[str, ...],
        fds: tuple[int, ...],
        explain: Callable[[str], Awaitable[OpendsecError]],
        look: Callable[[], Awaitable[OpendsecError | None]],
    ) -> Image:
        progress = self.running[name] = Progress(name)
        try:
            with self._store.scratch("skopeo") as scratch:
                source = _Source(
                    name, image, lambda: skopeo.proxy(arguments, fds, scratch), explain
                )
                made = await self._from_source(source, name, look, progress)
            await self._room.settle(made.digest)
            return made
        finally:
            if self.running.get(name) is progress:
                del self.running[name]

    async def _from_source(
        self,
        source: _Source,
        name: str,
        look: Callable[[], Awaitable[OpendsecError | None]],
        progress: Progress,
    ) -> Image:
        async with source:
            digest, raw_manifest, raw_config = await source.begin(look)
            manifest, configuration = manifests.read(raw_manifest, raw_config, name)
            config = manifests.to_config(configuration, name)
            with self._store.holding() as hold:
                layers = await self._all_layers(
                    source, manifest, configuration.rootfs.diff_ids or (), hold, progress
                )
                if len(set(layers)) > LAYERS_MAX:
                    layers = await collapse(self._store, layers, hold)
                return await asyncio.to_thread(
                    self._store.put, layers, config, names=[name], source=digest
                )

    # --- layers ---------------------------------------------------------------

    async def _all_layers(
        self,
        source: _Source,
        manifest: manifests.Manifest,
        diff_ids: tuple[str, ...],
        hold: Hold,
        progress: Progress,
    ) -> list[str]:
        wanted = dict(zip(diff_ids, manifest.layers, strict=True))
        missing = {
            diff: part
            for diff, part in wanted.items()
            if await asyncio.to_thread(hold.claim, diff) is None
        }
        progress.layers, progress.layers_done = len(wanted), len(wanted) - len(missing)
        progress.bytes_total = sum(part.size for part in missing.values())
        if progress.bytes_total > self._config.image_size_max_mb * _MIB:
            raise NodeFull(
                f"{source.what} has {progress.bytes_total // _MIB} MiB of layers, above the limit "
                f"of one image ({self._config.image_size_max_mb} MiB)",
                remediation="Use a smaller image, or raise image_size_max_mb.",
            )
        await self._room.make(progress.bytes_total)
        job = _Job(source, hold, progress, _Budget(self._config.image_size_max_mb * _MIB))
        await _together([self._have_layer(job, diff, part) for diff, part in missing.items()])
        if not wanted:
            await self._empty_layer(hold)
            return hold.layers
        layers = [self._store.layer_of(diff) for diff in diff_ids]
        if None in layers:
            raise Internal(f"{source.what}: a layer has vanished from the store")
        return [layer for layer in layers if layer is not None]

    async def _have_layer(self, job: _Job, diff: str, part: manifests.Descriptor) -> None:
        """One layer, by whichever pull is at it; if that one fails, by this."""

        async def fetch() -> None:
            await self._fetch_layer(job, diff, part)

        while await asyncio.to_thread(job.hold.claim, diff) is None:
            mine = diff not in self._layers
            try:
                await self._layers.join(diff, fetch)
            except OpendsecError:
                # Another pull's failure (its registry, its limit) need not be this one's.
                if mine:
                    raise
        job.progress.layers_done += 1
        job.progress.bytes_read[diff] = part.size

    async def _fetch_layer(self, job: _Job, diff: str, part: manifests.Descriptor) -> None:
        with self._store.scratch(diff[7:19]) as scratch:
            tree = scratch / "tree"
            tree.mkdir()
            async with self._fetching:
                unpacked = await self._unpack(job, diff, part, tree)
            job.budget.spend(unpacked.size_bytes)
            await self._make(tree, scratch / "layer", job.hold, unpacked)

    async def _make(self, tree: Path, target: Path, hold: Hold, unpacked: convert.Unpacked) -> None:
        async with self._making:
            await convert.make_erofs(tree, target)
        await asyncio.gather(
            asyncio.to_thread(shutil.rmtree, tree, ignore_errors=True),
            asyncio.to_thread(
                self._store.adopt,
                target,
                hold=hold,
                key=unpacked.diff,
                opaque_root=unpacked.opaque_root,
            ),
        )

    async def _empty_layer(self, hold: Hold) -> None:
        with self._store.scratch("empty") as scratch:
            (scratch / "tree").mkdir(mode=0o755)
            os.utime(scratch / "tree", (0, 0))
            await convert.make_erofs(scratch / "tree", scratch / "layer")
            await asyncio.to_thread(self._store.adopt, scratch / "layer", hold=hold)

    async def _unpack(
        self, job: _Job, diff: str, part: manifests.Descriptor, tree: Path
    ) -> convert.Unpacked:
        """Let a layer flow from the registry into a tree."""
        source = job.source
        stall_s = self._config.registry_stall_s
        try:
            async with source.line() as (proxy, image):
                blob = await proxy.blob(image, part.digest, part.size, stall_s)
                return await _flow(
                    proxy,
                    blob,
                    convert.unpack(
                        tree, source=blob.fd, blob=part.digest, diff=diff,
                        bytes_max=job.budget.left_bytes, stall_s=stall_s,
                        progress=lambda read: job.progress.bytes_read.update(
                            {diff: min(read, part.size)}
                        ),
                    ),
                )  # fmt: skip
        except (skopeo.SkopeoError, skopeo.SkopeoTimeout) as exc:
            # A time-out as well: skopeo waits by itself where the registry says "later".
            raise await source.explain(str(exc)) from exc
        except convert.Stalled as exc:
            raise RegistryUnavailable(f"{source.what} is too slow: {exc}") from exc


class _Budget:
    """What the layers of one image may still hold."""

    def __init__(self, left_bytes: int) -> None:
        self.left_bytes = left_bytes

    def spend(self, size_bytes: int) -> None:
        """Note what a layer holds.

        Raises:
            NodeFull: all of them hold too much.
        """
        self.left_bytes -= size_bytes
        if self.left_bytes < 0:
            raise NodeFull(
                "the image is larger than this node takes",
                remediation="Use a smaller image, or raise image_size_max_mb.",
            )


async def _flow(
    proxy: skopeo.Proxy, blob: skopeo.Blob, unpacking: Awaitable[convert.Unpacked]
) -> convert.Unpacked:
    """Unpack a layer while skopeo sends it, and tell by what both say whose failure it was."""
    sent = asyncio.ensure_future(proxy.finish(blob.pipe, limits.PULL_TIMEOUT_S))
    failure: OpendsecError | None = None
    unpacked: convert.Unpacked | None = None
    try:
        try:
            unpacked = await unpacking
        except OpendsecError as exc:
            failure = exc
        finally:
            os.close(blob.fd)
        try:
            await sent
        except skopeo.SkopeoError as exc:
            # When the reader has gone, skopeo's complaint is but the echo of that.
            if failure is None or _BROKEN_PIPE not in str(exc):
                raise
    finally:
        sent.cancel()
        await asyncio.wait({sent})
    if failure is not None:
        raise failure
    assert unpacked is not None
    return unpacked


async def _answered(
    work: Callable[[], Awaitable[T]],
    explain: Callable[[str], Awaitable[OpendsecError]],
    look: Callable[[], Awaitable[OpendsecError | None]],
) -> T:
    """What skopeo answers. It waits by itself when a registry says "later", for minutes: if it
    takes long, the registry is asked beside it."""
    task = asyncio.ensure_future(work())
    try:
        done, _ = await asyncio.wait({task}, timeout=limits.PROBE_AFTER_S)
        if not done:
            error = await look()
            if isinstance(error, RegistryLimited) and not task.done():
                raise error
        return await task
    except skopeo.SkopeoError as exc:
        raise await explain(str(exc)) from exc
    except skopeo.SkopeoTimeout as exc:
        raise RegistryUnavailable(f"the registry is too slow: {exc}") from exc
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


async def _together(work: list[Awaitable[None]]) -> None:
    """All of them; the first failure ends the others, and is raised when they have ended."""
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
