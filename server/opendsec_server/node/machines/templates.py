# SPDX-License-Identifier: AGPL-3.0-only
"""Saved memory of machines that have just booted, for others of the same kind to start from.

Made when the first machine of a kind is created. Every later one maps the same file of RAM
privately, so pages that none of them writes are in memory once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from opendsec_server.contract.errors import OpendsecError
from opendsec_server.contract.images import StartCommand
from opendsec_server.contract.node import NetworkPolicy, SandboxSpec
from opendsec_server.node import limits
from opendsec_server.node.paths import MACHINE_DISK
from opendsec_server.node.process import finish_in_thread
from opendsec_server.node.sandbox import Sandbox
from opendsec_server.node.services import Services
from opendsec_server.node.start import StartCommandFailed, StartCommandTimeout
from opendsec_server.node.storage.reflink import clone_file
from opendsec_server.node.vmm.base import Vmm

from .guests import Guests

log = structlog.get_logger("opendsec.node")

_TOKEN_FILE = "agent-token"  # noqa: S105 (a file's name)


@dataclass(frozen=True, slots=True)
class Template:
    """One template's files.

    Attributes:
        disk: The disk as it was when the memory was saved.
        memory: Directory of the saved memory.
        agent_token: Control token that the agent in it holds.
    """

    disk: Path
    memory: Path
    agent_token: str


Maker = Callable[[SandboxSpec, Path], Awaitable[None]]


class Templates:
    """Makes and finds them.

    Args:
        services: The node's parts.
        vmm: What they are made and restored by.
        guests: The guest image.
    """

    make: Maker
    """Boots a machine by a specification and saves its memory and disk into a directory."""

    def __init__(self, services: Services, vmm: Vmm, guests: Guests) -> None:
        self._services = services
        self._root = services.paths.templates
        self._vmm = vmm
        self._guests = guests
        self._making: dict[str, asyncio.Task[Template | None]] = {}
        self._failed_at: dict[str, float] = {}
        self._checked: set[str] = set()

    async def get(self, box: Sandbox) -> Template | None:
        """The template of a sandbox's kind; None: boot it instead."""
        if box.spec.template_id == "":
            return None  # this is the machine that a template is made of
        key = await self._key(box.spec)
        if time.monotonic() - self._failed_at.get(key, -math.inf) < limits.TEMPLATE_RETRY_S:
            return None
        task = self._making.get(key)
        if task is None:
            task = asyncio.create_task(self._find_or_make(key, box.spec), name=f"template-{key}")
            self._making[key] = task
            task.add_done_callback(lambda _: self._making.pop(key, None))
        return await asyncio.shield(task)

    async def _key(self, spec: SandboxSpec) -> str:
        """Everything that the saved memory depends on."""
        guest, vmm = await self._guests.get(), self._vmm.info
        kind = [
            [str(path) for path in self._services.layers.files(spec.image)],
            max(1, math.ceil(spec.cpu)),
            spec.memory_mb,
            spec.disk_mb,
            guest.kernel_version,
            guest.agent_sha256,
            vmm.name,
            vmm.version,
            vmm.accelerator,
            vmm.cpu_model,
        ]
        if (start := warm_start(spec)) is not None:
            # It may depend on who it runs as, and on whom it reached.
            users = [spec.default_user, spec.default_workdir]
            kind += [msgspec.to_builtins(start), users, msgspec.to_builtins(spec.network)]
        return hashlib.sha256(json.dumps(kind).encode()).hexdigest()[:24]

    async def _find_or_make(self, key: str, like: SandboxSpec) -> Template | None:
        directory = self._root / key
        if directory.exists() and key not in self._checked:
            try:
                await self._vmm.check(directory / "memory")
            except OpendsecError as exc:
                log.warning("template is made anew", template=key, why=exc.message)
                await finish_in_thread(shutil.rmtree, directory)
        if not directory.exists():
            try:
                await self._make(directory, like)
            except (StartCommandFailed, StartCommandTimeout):
                raise  # it would not become ready in a machine that boots, either
            except (OpendsecError, OSError) as exc:
                self._failed_at[key] = time.monotonic()
                log.error("template cannot be made; machines boot", template=key, error=str(exc))
                return None
        self._checked.add(key)
        os.utime(directory)
        token = (directory / _TOKEN_FILE).read_text()
        return Template(directory / MACHINE_DISK, directory / "memory", token)

    async def _make(self, directory: Path, like: SandboxSpec) -> None:
        started = time.monotonic()
        self._root.mkdir(mode=0o700, exist_ok=True)
        half = directory.with_suffix(".new")
        await finish_in_thread(shutil.rmtree, half, True)
        half.mkdir(mode=0o700)
        spec = _specification(directory.name, like)
        try:
            await self.make(spec, half)
            (half / _TOKEN_FILE).touch(0o600)
            (half / _TOKEN_FILE).write_text(spec.control_token)
            half.rename(directory)
        finally:
            await finish_in_thread(shutil.rmtree, half, True)
        log.info(
            "template made", template=directory.name, took_s=round(time.monotonic() - started, 2)
        )

    def sweep(self, in_use: set[Path]) -> None:
        """Remove what an interrupted start left, and the oldest beyond the number that is kept."""
        if not self._root.is_dir():
            return
        for entry in self._root.glob("*.new"):
            if entry.stem not in self._making:
                shutil.rmtree(entry, ignore_errors=True)
        kept = sorted(
            (e for e in self._root.iterdir() if e.suffix != ".new"),
            key=lambda e: e.stat().st_mtime,
            reverse=True,
        )
        for entry in kept[limits.MACHINE_TEMPLATES_MAX :]:
            if entry / "memory" not in in_use and entry.name not in self._making:
                self._checked.discard(entry.name)
                shutil.rmtree(entry, ignore_errors=True)


def warm_start(spec: SandboxSpec) -> StartCommand | None:
    """The start command that runs in the memory of a sandbox's template."""
    return spec.start if spec.start is not None and spec.start.warm else None


def copy_disk(source: Path, target: Path) -> None:
    """The disk that belongs to saved memory, beside it."""
    with contextlib.suppress(FileExistsError):
        clone_file(source, target)


def _specification(key: str, like: SandboxSpec) -> SandboxSpec:
    """A machine of the same kind that belongs to nobody. It may reach nothing, unless a start
    command runs in it: that may reach what those of its kind may."""
    start = warm_start(like)
    return msgspec.structs.replace(
        like,
        sandbox_id=f"t{key[:19]}",
        project_id="",
        template_id="",
        env={},
        start=start,
        snapshot_id=None,
        group=None,
        network=NetworkPolicy(internet=False) if start is None else like.network,
        access_token=secrets.token_hex(32),
        traffic_token=secrets.token_hex(32),
        control_token=secrets.token_hex(32),
    )
