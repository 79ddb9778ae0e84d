# SPDX-License-Identifier: AGPL-3.0-only
"""Runs one build: its stages, their steps, and at the end the start command."""

from __future__ import annotations

import asyncio
import contextlib
import io
import posixpath
import tarfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from opendsec_server.contract.errors import (
    AgentUnresponsive,
    BuildFailed,
    ImageNotFound,
    InvalidRequest,
    NotSupported,
    OpendsecError,
    PayloadTooLarge,
    SandboxStartFailed,
    StartTimeout,
)
from opendsec_server.contract.images import PackOptions, StartCommand
from opendsec_server.contract.limits import UNPACK_SOURCES_CHARS_MAX
from opendsec_server.contract.node import NodeClient
from opendsec_server.control.image_access import ImageAccess
from opendsec_server.control.snapshots import Origin
from opendsec_server.store import templates as store_templates
from opendsec_server.store.records import TemplateBuild
from opendsec_server.store.store import Store

from .archives import WILDCARDS, Manifest, read_manifest
from .logs import BuildLog
from .plan import BuildPlan, BuildStep, Stage, mode_of
from .sandboxes import Builders, Sizes
from .shape import (
    E2B_HOME,
    E2B_USER,
    Shape,
    absolute,
    command_argv,
    configured,
    key_of,
    prepare_argv,
    start_of,
    words_of,
)
from .uploads import Uploads, private_file

T = TypeVar("T")

BASE = "base"
FINALIZE = "finalize"
"""E2B's names of what comes before the first step and after the last."""
READY_POLL_S = 0.5


class StepLocks:
    """One lock per cached step, so that builds which need the same one do it once."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    @contextlib.asynccontextmanager
    async def hold(self, key: str) -> AsyncIterator[None]:
        """Hold the lock of a key; the next one in line finds what was made, or makes it."""
        lock, users = self._locks.get(key, (asyncio.Lock(), 0))
        self._locks[key] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[key]
            if users == 1:
                del self._locks[key]
            else:
                self._locks[key] = (lock, users - 1)


class Failure(Exception):
    """Where a build failed, and why."""

    def __init__(self, step: str, error: OpendsecError) -> None:
        super().__init__(error.message)
        self.step = step
        self.error = error


class Result(msgspec.Struct, kw_only=True, frozen=True):
    """What a build has made."""

    shape: Shape
    start: StartCommand | None


class Tools(msgspec.Struct, kw_only=True, frozen=True):
    """What every build uses."""

    store: Store
    node: NodeClient
    access: ImageAccess
    builders: Builders
    uploads: Uploads
    locks: StepLocks


class Runner:
    """One build that runs."""

    def __init__(
        self,
        tools: Tools,
        build: TemplateBuild,
        plan: BuildPlan,
        build_log: BuildLog,
        *,
        origin_of: Callable[[str], Awaitable[Origin]],
        end_at: float,
    ) -> None:
        self._tools = tools
        self._node = tools.node
        self._build = build
        self._plan = plan
        self._log = build_log
        self._origin_of = origin_of
        self._e2b = plan.style == "e2b"
        self._end_at = end_at
        self._sizes = Sizes(
            project_id=build.project_id,
            cpu=build.cpu,
            memory_mb=build.memory_mb,
            end_at=end_at,
        )
        self._stages: dict[str, Shape] = {}
        self._manifests: dict[Path, Manifest] = {}
        self.step = BASE
        self.images: set[str] = set()
        """Digests that must not be removed while it runs."""

    async def run(self) -> Result:
        """Do it all.

        Raises:
            Failure: with the step.
        """
        try:
            shape = await self._stage(self._plan.stages[-1])
            self.step = FINALIZE
            return await self._finalize(shape)
        except OpendsecError as exc:
            raise Failure(self.step, exc) from exc

    # --- stages -------------------------------------------------------------

    async def _stage(self, stage: Stage) -> Shape:
        known = self._stages.get(stage.name)
        if known is not None:
            return known
        self.step = BASE
        shape = await self._base(stage)
        forced = self._plan.force
        total = len(stage.steps)
        for number, step in enumerate(stage.steps, 1):
            forced = forced or step.force
            title = self._title(stage, number, total, step)
            if step.from_stage is not None:
                # Its steps count under their own numbers.
                await self._stage(self._stage_named(step.from_stage))
            self.step = str(number)
            if step.type in ("RUN", "COPY"):
                shape = await self._file_step(shape, step, title, forced)
            else:
                self._say(title)
                shape = configured(shape, step, e2b=self._e2b)
            self.images.add(shape.image)
        if shape.pending:
            shape = await self._layer(
                shape, ("PREPARE",), f"[{stage.name}] working directory and user", forced, None
            )
        self._stages[stage.name] = shape
        return shape

    def _stage_named(self, name: str) -> Stage:
        return next(stage for stage in self._plan.stages if stage.name == name)

    async def _base(self, stage: Stage) -> Shape:
        if stage.from_stage is not None:
            return await self._stage(self._stage_named(stage.from_stage))
        if stage.from_template is not None:
            self._say(f"[{BASE}] FROM template {stage.from_template}")
            return await self._base_template(stage.from_template)
        if stage.from_image is None:
            raise NotSupported(
                "a build cannot begin with an empty image (FROM scratch)",
                remediation="Begin with a small image such as busybox or a distroless one.",
            )
        self._say(f"[{BASE}] FROM {stage.from_image}")
        info = await self._tools.access.pull(
            self._build.project_id, stage.from_image, auth=self._plan.auth, refresh=True
        )
        self._say(f"{stage.from_image} is {info.digest}", level="debug")
        self.images.add(info.digest)
        config = info.config
        shape = Shape(
            image=info.digest,
            config=config,
            user=config.user or "root",
            workdir=config.workdir or None,
            env=dict(config.env),
        )
        if not self._e2b:
            return shape
        shape = msgspec.structs.replace(shape, user="root", workdir=None, users=(E2B_USER,))
        shape = await self._layer(
            shape, ("USER", E2B_USER), f"[{BASE}] user `{E2B_USER}`", self._plan.force, None
        )
        return msgspec.structs.replace(shape, user=E2B_USER, workdir=E2B_HOME)

    async def _base_template(self, reference: str) -> Shape:
        origin = await self._origin_of(reference)
        if origin.snapshot_id is not None or origin.backend is not None:
            raise NotSupported(
                f"`{reference}` is a snapshot or a disk image, and a build needs layers",
                remediation="Build from a template or an image.",
            )
        info = await self._node.images.get(origin.image)
        self.images.add(info.digest)
        home = E2B_HOME if self._e2b and origin.default_user == E2B_USER else None
        return Shape(
            image=info.digest,
            config=info.config,
            user=origin.default_user,
            workdir=origin.default_workdir or home,
            env={**info.config.env, **origin.env},
            start=origin.start,
        )

    # --- steps --------------------------------------------------------------

    async def _file_step(self, shape: Shape, step: BuildStep, title: str, forced: bool) -> Shape:
        if step.type == "RUN":
            user = step.args[1] if len(step.args) > 1 and step.args[1] else shape.user

            async def run(sandbox_id: str) -> None:
                await self._tools.builders.run(
                    sandbox_id,
                    command_argv(step.args[0], e2b=self._e2b),
                    shown=step.args[0],
                    user=user,
                    workdir=shape.workdir,
                    env=shape.args or None,
                    timeout_s=self._left_s(),
                    build_log=self._log,
                    step=self.step,
                )

            what = ("RUN", step.args[0], user, self._e2b)
            return await self._layer(shape, what, title, forced, run, with_args=True)
        return await self._copy(shape, step, title, forced)

    async def _copy(self, shape: Shape, step: BuildStep, title: str, forced: bool) -> Shape:
        step = msgspec.structs.replace(step, args=words_of(shape, step, e2b=self._e2b))
        sources = [_relative(source) for source in (step.args[0], *step.more_sources)]
        target = absolute(shape, step.args[1])
        default_owner = shape.user if self._e2b else "root"
        owner = (step.args[2] if len(step.args) > 2 else "") or default_owner
        mode = mode_of(step)
        if step.from_stage is not None:
            other = self._stages[step.from_stage]
            inputs = other.image

            async def copy(sandbox_id: str) -> None:
                await self._copy_from_stage(sandbox_id, other, sources, target, owner, mode)
        else:
            assert step.files_hash is not None
            inputs = step.files_hash
            archive = self._archive(step)
            if not self._e2b:
                inputs = await self._inputs(archive, sources)

            async def copy(sandbox_id: str) -> None:
                await self._unpack(sandbox_id, archive, sources, target, owner, mode)

        what = ("COPY", inputs, tuple(sources), target, owner, mode)
        return await self._layer(shape, what, title, forced, copy)

    def _archive(self, step: BuildStep) -> Path:
        assert step.files_hash is not None
        project_id = self._build.project_id
        if not self._tools.uploads.present(project_id, step.files_hash):
            raise BuildFailed(
                f"the files of `{step.args[0][:200]}` were not sent",
                remediation="Send the archive to the address that the server gives for it, "
                "then build again.",
            )
        return self._tools.uploads.path(project_id, step.files_hash)

    async def _inputs(self, archive: Path, sources: list[str]) -> str:
        """What the result of copying these hangs on: what they match, and what that holds."""
        manifest = await self._manifest(archive)
        return await _in_thread(lambda stop: manifest.digest(_found(manifest, sources, stop)))

    async def _manifest(self, archive: Path) -> Manifest:
        """Read once per build: every COPY of a Dockerfile copies from the same archive."""
        found = self._manifests.get(archive)
        if found is None:
            bytes_max = self._tools.builders.step_bytes_max
            found = await _in_thread(
                lambda stop: read_manifest(archive, bytes_max=bytes_max, stop=stop)
            )
            self._manifests[archive] = found
        return found

    async def _unpack(
        self,
        sandbox_id: str,
        archive: Path,
        sources: list[str],
        target: str,
        owner: str,
        mode: int | None,
    ) -> None:
        if len(sources) > 1 and not target.endswith("/"):
            target += "/"
        for some in _in_calls(sources):
            try:
                await self._node.unpack(
                    sandbox_id, str(archive), sources=some, target=target, user=owner, mode=mode
                )
            except InvalidRequest as exc:
                raise BuildFailed(f"COPY of `{' '.join(some)[:200]}`: {exc.message}") from exc

    async def _copy_from_stage(
        self,
        sandbox_id: str,
        other: Shape,
        sources: list[str],
        target: str,
        owner: str,
        mode: int | None,
    ) -> None:
        """Take files out of another stage's image by its own ``tar``, and put them here."""
        scratch = self._tools.uploads.scratch(self._build.project_id)
        try:
            async with self._tools.builders.sandbox(self._sizes, other) as from_id:
                await self._pack_up(from_id, sources, scratch)
            await self._unpack(sandbox_id, scratch, sources, target, owner, mode)
        finally:
            scratch.unlink(missing_ok=True)

    async def _pack_up(self, sandbox_id: str, sources: list[str], archive: Path) -> None:
        argv: tuple[str, ...] = ("tar", "-cf", "-", "-C", "/", "--", *sources)
        if any(map(WILDCARDS.intersection, sources)):
            argv = ("/bin/sh", "-c", f"cd / && exec tar -cf - -- {' '.join(sources)}")
        told = b""
        size_bytes = 0
        out = await asyncio.to_thread(private_file, archive)
        try:
            async for event in self._node.exec(
                sandbox_id, argv, user="root", workdir="/", timeout_s=self._left_s()
            ):
                if event.kind == "stdout":
                    size_bytes += len(event.data)
                    if size_bytes > self._tools.uploads.bytes_max:
                        raise PayloadTooLarge(
                            "what is copied from another stage is larger than "
                            f"{self._tools.uploads.bytes_max} bytes"
                        )
                    await asyncio.to_thread(out.write, event.data)
                elif event.kind == "stderr":
                    told = (told + event.data)[-2_000:]
                elif event.exit_code != 0:
                    raise BuildFailed(
                        f"`{' '.join(sources)[:200]}` cannot be read in that stage: "
                        + told.decode(errors="replace").strip()
                    )
        except InvalidRequest as exc:
            raise BuildFailed(
                "the image of that stage has no `tar`, which copying from it needs",
                remediation="Use a stage whose image has tar, or copy the files from the context.",
            ) from exc
        finally:
            await asyncio.to_thread(out.close)

    async def _layer(
        self,
        shape: Shape,
        what: tuple[object, ...],
        title: str,
        forced: bool,
        work: Callable[[str], Awaitable[None]] | None,
        *,
        with_args: bool = False,
    ) -> Shape:
        """The shape after work in a sandbox of it: as it came out before, or now."""
        key = key_of(shape, what, with_args=with_args)
        async with self._tools.locks.hold(f"{self._build.project_id}/{key}"):
            image = None if forced else await self._cached(key)
            if image is not None:
                self._say(f"{title} (cached)")
                return shape.on(image)
            self._say(title)
            began = time.monotonic()
            async with self._tools.builders.sandbox(self._sizes, shape) as sandbox_id:
                if shape.pending:
                    await self._prepare(sandbox_id, shape)
                if work is not None:
                    await work(sandbox_id)
                info = await self._node.pack(sandbox_id, PackOptions(config=shape.image_config))
            self.images.add(info.digest)
            await store_templates.put_step(
                self._tools.store, self._build.project_id, key, info.digest, time.time()
            )
        took_s = time.monotonic() - began
        self._say(f"done in {took_s:.1f} s: {info.digest[:19]}", level="debug")
        return shape.on(info.digest)

    async def _prepare(self, sandbox_id: str, shape: Shape) -> None:
        try:
            await self._tools.builders.run(
                sandbox_id,
                prepare_argv(shape),
                shown="making users and working directories",
                user="root",
                workdir="/",
                env=None,
                timeout_s=self._left_s(),
                build_log=self._log,
                step=self.step,
            )
        except InvalidRequest as exc:
            if shape.users:
                raise BuildFailed(
                    "the image has no /bin/sh, which making the user needs",
                    remediation="Use an image with a shell; or build it from a Dockerfile by "
                    "`opendsec template build`, which keeps the image's own user.",
                ) from exc
            # No shell there: an empty directory is copied instead.
            with _empty_directory(self._tools.uploads, self._build.project_id) as archive:
                for path, owner in shape.directories:
                    await self._node.unpack(
                        sandbox_id, str(archive), sources=("d",), target=path, user=owner, mode=None
                    )

    async def _cached(self, key: str) -> str | None:
        image = await store_templates.cached_step(
            self._tools.store, self._build.project_id, key, time.time()
        )
        if image is None:
            return None
        try:
            return (await self._node.images.get(image)).digest
        except ImageNotFound:
            # Pruned since: the step is done again.
            return None

    # --- the end ------------------------------------------------------------

    async def _finalize(self, shape: Shape) -> Result:
        info = await self._node.images.get(shape.image)
        if info.config != shape.image_config:
            # What came after the last step that made something.
            info = await self._node.images.compose([shape.image], config=shape.image_config)
            shape = shape.on(info.digest)
            self.images.add(info.digest)
        start = start_of(self._plan, shape)
        ready = self._plan.ready_cmd if start is None else None
        if start is None and not ready:
            return Result(shape=shape, start=None)
        self._say("trying the start command" if start else "waiting for the ready command")
        try:
            # As those of the template will be: a machine's memory is saved for the next ones.
            async with self._tools.builders.sandbox(
                self._sizes, shape, start, disk_mb=self._build.disk_mb
            ) as sandbox_id:
                if ready:
                    await self._await_ready(sandbox_id, shape, ready)
        except (SandboxStartFailed, StartTimeout, AgentUnresponsive) as exc:
            if start is None:
                raise
            raise BuildFailed(
                f"the start command did not come up: {exc.message}",
                remediation="Run it in a sandbox of the template without it, and look.",
            ) from exc
        return Result(shape=shape, start=start)

    async def _await_ready(self, sandbox_id: str, shape: Shape, ready: str) -> None:
        until = time.monotonic() + min(300.0, self._left_s())
        while True:
            try:
                await self._tools.builders.run(
                    sandbox_id,
                    command_argv(ready, e2b=self._e2b),
                    shown=ready,
                    user=shape.user,
                    workdir=shape.workdir,
                    env=None,
                    timeout_s=self._left_s(),
                    build_log=self._log,
                    step=self.step,
                )
                return
            except BuildFailed:
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(READY_POLL_S)

    # --- small --------------------------------------------------------------

    def _left_s(self) -> float:
        return max(1.0, self._end_at - time.time())

    def _say(self, message: str, **more: Any) -> None:
        self._log.write(message, step=self.step, **more)

    def _title(self, stage: Stage, number: int, total: int, step: BuildStep) -> str:
        name = stage.name if len(self._plan.stages) > 1 else "builder"
        # The second word of a RUN is who runs it.
        shown = step.args[:1] if step.type == "RUN" else step.args
        words = " ".join(word for word in shown if word)[:500]
        return f"[{name} {number}/{total}] {step.type} {words}"


def _relative(source: str) -> str:
    return posixpath.normpath(source.lstrip("/") or ".")


async def _in_thread(work: Callable[[threading.Event], T]) -> T:
    """Run what is told when nobody waits for it any more: a thread cannot be cancelled, and there
    are few of them."""
    stop = threading.Event()
    try:
        return await asyncio.to_thread(work, stop)
    finally:
        stop.set()


def _found(manifest: Manifest, sources: list[str], stop: threading.Event) -> list[str]:
    """Sources with their wildcards resolved.

    Raises:
        BuildFailed: nothing matches one; or nobody waits for the answer.
    """
    found: list[str] = []
    for source in sources:
        if stop.is_set():
            raise BuildFailed("the build was given up")
        matching = manifest.matching(source) if WILDCARDS.intersection(source) else [source]
        if not matching:
            raise BuildFailed(
                f"nothing in the files that were sent matches `{source[:200]}`",
                remediation="Check the path and the files that are ignored.",
            )
        found += matching
    return found


def _in_calls(sources: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Sources by calls: as a rule all of them, as the archive is read once for each."""
    some: list[str] = []
    chars = 0
    for source in sources:
        if len(source) > UNPACK_SOURCES_CHARS_MAX:
            raise BuildFailed(f"COPY: a source has more than {UNPACK_SOURCES_CHARS_MAX} characters")
        chars += len(source)
        if chars > UNPACK_SOURCES_CHARS_MAX:
            yield tuple(some)
            some, chars = [], len(source)
        some.append(source)
    yield tuple(some)


@contextlib.contextmanager
def _empty_directory(uploads: Uploads, project_id: str) -> Iterator[Path]:
    path = uploads.scratch(project_id)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        member = tarfile.TarInfo("d")
        member.type, member.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(member)
    try:
        with private_file(path) as out:
            out.write(buffer.getvalue())
        yield path
    finally:
        path.unlink(missing_ok=True)
