# SPDX-License-Identifier: AGPL-3.0-only
"""Pause, resume and snapshot: what happens to a sandbox between its start and its end.

One operation at a time per sandbox. A second call of the same kind joins the first; others wait
for it, or are told that the state does not allow them. A kill waits for the operation too, after
telling it to give up.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import structlog

from opendsec_server.contract.errors import (
    AlreadyPaused,
    NodeFull,
    NodeUnavailable,
    NotSupported,
    OpendsecError,
    ResumeFailed,
    SandboxStartFailed,
    SnapshotFailed,
    SnapshotNotFound,
    StartTimeout,
    StateConflict,
)
from opendsec_server.contract.node import PauseReport, Snapshot, StateMode
from opendsec_server.contract.states import State

from . import crash, limits, process
from .backends import Backend
from .hooks import set_up, tear_down
from .lifecycle import Lifecycle, check_abort
from .process import finish_in_thread
from .sandbox import Operation, Sandbox, status_of
from .services import Services
from .storage.pool import SNAPSHOT_MEMORY
from .storage.reflink import clone_tree

log = structlog.get_logger("opendsec.node")


class Suspend:
    """The operations.

    Args:
        services: The node's parts.
        lifecycle: Moves states, watches and ends sandboxes.
    """

    def __init__(self, services: Services, lifecycle: Lifecycle) -> None:
        self._pool = services.pool
        self._meters = services.meters
        self._paths = services.paths
        self._snapshots = services.snapshots
        self._lifecycle = lifecycle

    # --- one at a time ------------------------------------------------------

    async def _exclusively(
        self, box: Sandbox, kind: str, work: Callable[[], Coroutine[Any, Any, Any]]
    ) -> Any:
        """Run ``work`` as the sandbox's operation; it goes on when the caller goes away."""

        async def body() -> Any:
            try:
                return await work()
            finally:
                box.operation = None

        task = self._lifecycle.spawn(body(), f"{kind}-{box.sandbox_id}")
        box.operation = Operation(kind, task)
        return await asyncio.shield(task)

    def _refuse(self, box: Sandbox, what: str) -> StateConflict:
        state = State.STOPPING if box.end_task is not None else box.state
        return StateConflict(
            f"sandbox {box.sandbox_id} is {state}; it cannot be {what} now",
            details={"state": str(state)},
        )

    @staticmethod
    async def _others(box: Sandbox, *, but: str = "") -> Operation | None:
        """Wait until no operation is under way; or return one of the kind ``but``."""
        while (operation := box.operation) is not None:
            if operation.kind == but:
                return operation
            await asyncio.wait({operation.task})
        return None

    # --- pause --------------------------------------------------------------

    async def pause(self, box: Sandbox, mode: StateMode, *, cause: str = "pause") -> PauseReport:
        """See ``NodeClient.pause``."""
        if box.operation is not None and box.operation.kind == "resume":
            raise self._refuse(box, "paused")
        joined = await self._others(box, but="pause")
        if joined is not None:
            report: PauseReport = await asyncio.shield(joined.task)
            return report
        if box.end_task is None and box.state is State.PAUSED:
            raise AlreadyPaused(f"sandbox {box.sandbox_id} is already paused")
        if box.end_task is not None or box.state is not State.RUNNING:
            raise self._refuse(box, "paused")
        paused: PauseReport = await self._exclusively(
            box, "pause", lambda: self._pause(box, mode, cause)
        )
        return paused

    async def _pause(self, box: Sandbox, mode: StateMode, cause: str) -> PauseReport:
        backend = self._lifecycle.backend_of(box)
        started = time.monotonic()
        before = backend.memory_bytes(box)
        in_place = mode == "full" and not backend.info.capabilities.pause_survives_reboot
        stored = 0
        box.record.pause_mode = mode
        try:
            await self._lifecycle.move(box, State.PAUSING, cause=cause)
        except BaseException:
            box.record.pause_mode = None
            raise
        try:
            crash.point("pause:begun")
            if in_place:
                # Before and after: the memory that it gives back counts until now.
                self._meters.read(box)
                await backend.freeze(box)
                await backend.put_away(box)
                self._meters.read(box)
                crash.point("pause:frozen")
            else:
                await backend.disconnect(box)
                if mode == "full":
                    # So that the disk alone is whole too: for what is made of it meanwhile.
                    with contextlib.suppress(OpendsecError):
                        await backend.settle(box)
                    await backend.freeze(box)
                    stored = await self._save_own_memory(box, backend)
                else:
                    await backend.settle(box)
        except Exception as exc:
            await self._go_on(box, backend, cause="pause failed")
            raise _as_failure(exc, "it could not be paused") from exc
        after = backend.memory_bytes(box) if in_place else 0
        if not in_place:
            await self.end_run(box)
            crash.point("pause:run ended")
        await finish_in_thread(self._pool.sync)
        self._lifecycle.disarm(box)
        await self._insist(box, State.PAUSED, cause=cause)
        crash.point("pause:done")
        return PauseReport(
            status=status_of(box.record),
            took_s=time.monotonic() - started,
            memory_before_bytes=before,
            memory_freed_bytes=max(0, before - after),
            stored_bytes=stored,
        )

    async def _save_own_memory(self, box: Sandbox, backend: Backend) -> int:
        """Under another name first: a directory of the right name is always whole."""
        target = self._paths.saved_memory(box.sandbox_id)
        half = target.with_suffix(".new")
        await finish_in_thread(shutil.rmtree, half, True)
        try:
            stored = await backend.save_memory(box, half)
            await backend.seal_memory(half, durable=True)
            crash.point("pause:saved")
            await finish_in_thread(shutil.rmtree, target, True)
            half.rename(target)
        except BaseException:
            await finish_in_thread(shutil.rmtree, half, True)
            raise
        return stored

    async def end_run(self, box: Sandbox) -> None:
        """Take down what runs of it and keep the rest."""
        self._lifecycle.unwatch(box)
        failures = await tear_down(self._lifecycle.backend_of(box).run_hooks, box)
        for hook, error in failures:
            log.error("teardown", sandbox_id=box.sandbox_id, hook=hook, error=repr(error))
        record = box.record
        record.pid = record.pid_ticks = record.slot = record.ram_base = None

    async def _go_on(self, box: Sandbox, backend: Backend, *, cause: str) -> None:
        """Back to running, after something went wrong before its run was ended."""
        if box.pidfd is None or process.has_ended(box.pidfd):
            return  # its end is noticed by the watch, and recorded as what it is
        try:
            if not backend.info.capabilities.pause_survives_reboot:
                await backend.take_up(box)
            await backend.thaw(box)
        except Exception:
            log.exception("sandbox cannot be continued", sandbox_id=box.sandbox_id)
        box.record.pause_mode = None
        await self._insist(box, State.RUNNING, cause=cause)

    async def _insist(self, box: Sandbox, state: State, *, cause: str) -> None:
        """Record what is already so. A journal that cannot be written now only delays it."""
        while True:
            try:
                await self._lifecycle.move(box, state, cause=cause)
            except NodeUnavailable:
                if self._lifecycle.closing:
                    raise
                await asyncio.sleep(limits.JOURNAL_RETRY_S)
            else:
                return

    # --- resume -------------------------------------------------------------

    async def resume(self, box: Sandbox, end_at: float, *, reboot: bool) -> None:
        """See ``NodeClient.resume``."""
        joined = await self._others(box, but="resume")
        if joined is not None:
            await asyncio.shield(joined.task)
        if box.end_task is None and box.state is State.RUNNING:
            await self._lifecycle.extend(box, end_at, only_extend=True)
            return
        if box.end_task is not None or box.state is not State.PAUSED:
            raise self._refuse(box, "resumed")
        self._lifecycle.admit_again()
        await self._exclusively(box, "resume", lambda: self._resume(box, end_at, reboot))

    async def _resume(self, box: Sandbox, end_at: float, reboot: bool) -> None:
        backend = self._lifecycle.backend_of(box)
        frozen = box.pidfd is not None
        before, box.record.end_at = box.record.end_at, end_at
        try:
            await self._lifecycle.move(box, State.RESUMING, cause="resume")
            crash.point("resume:begun")
            if frozen and not reboot:
                self._meters.read(box)
                await backend.take_up(box)
                await backend.thaw(box)
            else:
                await self._run_again(box, backend, reboot)
            crash.point("resume:runs")
        except Exception as exc:
            box.record.end_at = before
            await self._stay_paused(box, backend)
            raise _as_resume_failure(exc) from exc
        box.record.pause_mode = None
        await self._insist(box, State.RUNNING, cause="resume")
        if frozen and not reboot:
            self._lifecycle.arm(box)
            return
        self._lifecycle.watch(box)
        # The saved memory stays while the machine maps it: the next pause stores differences.
        for kept in self._paths.kept_disks(box.sandbox_id):
            kept.unlink()
        if box.record.ram_base is None:
            saved = self._paths.saved_memory(box.sandbox_id)
            await finish_in_thread(shutil.rmtree, saved, True)

    async def _run_again(self, box: Sandbox, backend: Backend, reboot: bool) -> None:
        await self.end_run(box)
        saved = self._paths.saved_memory(box.sandbox_id)
        box.restore_from = None
        box.start_in_memory = False
        if box.record.pause_mode == "full" and not reboot:
            await backend.check_memory(saved)
            box.restore_from, box.start_in_memory = saved, True
        elif self._paths.kept_disk(box.sandbox_id).exists():
            # A resume of the memory failed before: what it wrote to the disk does not count.
            await finish_in_thread(self._put_back_disk, box)
        try:
            async with self._lifecycle.turn(box) as deadline, asyncio.timeout_at(deadline):
                await set_up(backend.run_hooks, box, lambda: check_abort(box))
            await self._lifecycle.programs.run(box)
            check_abort(box)
        finally:
            box.restore_from = None

    def _put_back_disk(self, box: Sandbox) -> None:
        for kept in self._paths.kept_disks(box.sandbox_id):
            kept.replace(self._paths.disk(box.sandbox_id) / kept.name)

    async def _stay_paused(self, box: Sandbox, backend: Backend) -> None:
        if box.state is not State.RESUMING:
            return  # the journal did not take the first move: nothing has changed
        kept_in_place = not backend.info.capabilities.pause_survives_reboot
        if kept_in_place and box.record.pause_mode == "full" and box.pidfd is not None:
            with contextlib.suppress(OpendsecError, OSError):
                await backend.freeze(box)
                await backend.put_away(box)
        else:
            await self.end_run(box)
            if kept_in_place:
                box.record.pause_mode = "filesystem"
        await self._insist(box, State.PAUSED, cause="resume failed")

    # --- after a restart of the daemon --------------------------------------

    async def continue_interrupted(self, box: Sandbox) -> None:
        """Its processes live; the operation that the last daemon had begun is undone."""
        if box.record.pid is not None:
            # Its agent may have been told that it is being paused.
            box.asleep = box.state is State.PAUSING and box.record.pause_mode is not None
            await self._go_on(box, self._lifecycle.backend_of(box), cause="reconcile")

    async def settle_paused(self, box: Sandbox, mode: StateMode, message: str | None) -> None:
        """Nothing of it runs, or nothing that could go on: it is paused."""
        await self.end_run(box)
        half = self._paths.saved_memory(box.sandbox_id).with_suffix(".new")
        await finish_in_thread(shutil.rmtree, half, True)
        box.record.pause_mode = mode
        box.record.message = message or box.record.message
        if box.state is State.PAUSED:
            await self._lifecycle.save(box)
        else:
            await self._insist(box, State.PAUSED, cause="reconcile")

    # --- at the end time ----------------------------------------------------

    async def time_out(self, box: Sandbox) -> None:
        """Pause instead of ending. What cannot be paused now runs on and is tried again: losing
        it would be worse than keeping it longer."""
        try:
            await self.pause(box, box.spec.pause_mode, cause="deadline")
        except (AlreadyPaused, StateConflict):
            return
        except OpendsecError as exc:
            log.warning("pause at end", sandbox_id=box.sandbox_id, error=exc.message)
            if box.state is State.RUNNING and box.end_task is None:
                again = time.time() + limits.PAUSE_RETRY_S
                self._lifecycle.deadlines.set(f"ttl:{box.sandbox_id}", again)

    # --- memory lost while paused -------------------------------------------

    async def lost_memory(self, box: Sandbox, why: str) -> None:
        """The frozen processes of a paused sandbox are gone; its disk is not."""
        await self._others(box)
        if box.end_task is not None or box.state is not State.PAUSED:
            return

        async def work() -> None:
            await self.end_run(box)
            box.record.pause_mode = "filesystem"
            box.record.message = (
                f"its memory was lost while it was paused ({why}); its disk is kept"
            )
            await self._lifecycle.save(box)

        await self._exclusively(box, "lost-memory", work)

    # --- snapshot -----------------------------------------------------------

    async def snapshot(
        self, box: Sandbox, snapshot_id: str, mode: StateMode, *, ephemeral: bool
    ) -> Snapshot:
        """See ``NodeClient.snapshot``."""
        await self._others(box)
        with contextlib.suppress(SnapshotNotFound):
            return self._snapshots.get(snapshot_id)
        if box.end_task is not None or box.state not in (State.RUNNING, State.PAUSED):
            raise self._refuse(box, "saved")
        if mode == "full" and not self._lifecycle.backend_of(box).info.capabilities.memory_snapshot:
            raise NotSupported(
                f"the memory of a {box.spec.backend} cannot be saved",
                remediation="Ask for the mode `filesystem`: it saves the disk.",
            )
        if mode == "full" and box.state is State.PAUSED and box.record.pause_mode != "full":
            raise NotSupported(
                "this sandbox was paused without its memory",
                remediation="Ask for the mode `filesystem`, or resume it first.",
            )
        self._lifecycle.admit_again()
        snapshot: Snapshot = await self._exclusively(
            box, "snapshot", lambda: self._snapshot(box, snapshot_id, mode, ephemeral)
        )
        return snapshot

    async def _snapshot(
        self, box: Sandbox, snapshot_id: str, mode: StateMode, ephemeral: bool
    ) -> Snapshot:
        spec = box.spec
        info = Snapshot(
            snapshot_id=snapshot_id,
            source_id=spec.sandbox_id,
            backend=spec.backend,
            mode=mode,
            image=spec.image,
            cpu=spec.cpu,
            memory_mb=spec.memory_mb,
            disk_mb=spec.disk_mb,
            created_at=time.time(),
            disk_bytes=0,
            memory_bytes=0,
            vm=spec.vm,
            start=spec.start,
        )
        token = spec.control_token if mode == "full" else ""
        await self._snapshots.begin(info, ephemeral=ephemeral, control_token=token)
        try:
            crash.point("snapshot:begun")
            if box.state is State.RUNNING:
                info = await self._of_running(box, info, ephemeral)
            else:
                info = await self._of_paused(box, info)
            crash.point("snapshot:made")
            if not ephemeral:
                await finish_in_thread(self._pool.sync)
            await self._snapshots.complete(info)
            crash.point("snapshot:done")
        except BaseException as exc:
            await self._snapshots.remove(snapshot_id)
            if isinstance(exc, Exception):
                raise _as_failure(exc, "it could not be saved") from exc
            raise
        return info

    async def _of_running(self, box: Sandbox, info: Snapshot, ephemeral: bool) -> Snapshot:
        backend = self._lifecycle.backend_of(box)
        if info.mode == "filesystem":
            await backend.settle(box)
        await self._lifecycle.move(box, State.PAUSING, cause="snapshot")
        try:
            await backend.freeze(box)
            crash.point("snapshot:frozen")
            directory, disk_bytes = await finish_in_thread(self._copy_disk, box, info.snapshot_id)
            memory_bytes = 0
            if info.mode == "full":
                memory_bytes = await backend.save_memory(box, directory / SNAPSHOT_MEMORY)
        finally:
            await self._go_on(box, backend, cause="snapshot")
        if info.mode == "full":
            await backend.seal_memory(directory / SNAPSHOT_MEMORY, durable=not ephemeral)
        return msgspec.structs.replace(info, disk_bytes=disk_bytes, memory_bytes=memory_bytes)

    async def _of_paused(self, box: Sandbox, info: Snapshot) -> Snapshot:
        directory, disk_bytes = await finish_in_thread(self._copy_disk, box, info.snapshot_id)
        memory_bytes = 0
        if info.mode == "full":
            saved = self._paths.saved_memory(box.sandbox_id)
            memory_bytes = await finish_in_thread(clone_tree, saved, directory / SNAPSHOT_MEMORY)
        return msgspec.structs.replace(info, disk_bytes=disk_bytes, memory_bytes=memory_bytes)

    def _copy_disk(self, box: Sandbox, snapshot_id: str) -> tuple[Path, int]:
        directory = self._pool.create_snapshot(box.sandbox_id, snapshot_id)
        # Counted after it: only then the latest writes are.
        used = self._pool.used_bytes(box.sandbox_id) + box.record.disk_base_bytes
        return directory, used


def _as_failure(exc: Exception, what: str) -> OpendsecError:
    if isinstance(exc, OpendsecError):
        return exc
    if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return NodeFull(f"{what}: the node's disk is full")
    log.error("save failed", exc_info=exc)
    return SnapshotFailed(f"{what}: {exc}")


def _as_resume_failure(exc: Exception) -> OpendsecError:
    if isinstance(exc, (SandboxStartFailed, StartTimeout)):
        return ResumeFailed(exc.message, remediation=exc.remediation)
    if isinstance(exc, OpendsecError):
        return exc
    if isinstance(exc, TimeoutError):
        return ResumeFailed("the sandbox did not come up again in time")
    log.error("resume failed", exc_info=exc)
    return ResumeFailed(f"the sandbox did not come up again: {exc}")
