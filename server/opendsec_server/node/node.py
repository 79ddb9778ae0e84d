# SPDX-License-Identifier: AGPL-3.0-only
"""The node: what the control plane talks to (``contract.node.NodeClient``), in process."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import platform
import resource
import shutil
import stat
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog

from opendsec_server import __version__
from opendsec_server.binaries import find_agent
from opendsec_server.config import Config, ConfigError
from opendsec_server.contract.actions import KeptProgram, ProgramOrder
from opendsec_server.contract.errors import (
    ImageNotFound,
    NodeFull,
    NotSupported,
    SandboxNotFound,
    SandboxStartFailed,
    StateConflict,
    TemplateNotFound,
)
from opendsec_server.contract.images import ExecEvent, ImageInfo, NodeImages, PackOptions
from opendsec_server.contract.node import (
    ConsoleKind,
    MetricSample,
    NetworkPolicy,
    NodeEvent,
    NodeInfo,
    PauseReport,
    Route,
    SandboxSpec,
    SandboxStatus,
    SandboxUsage,
    Snapshot,
    StateMode,
)
from opendsec_server.contract.node import Snapshots as SnapshotList
from opendsec_server.contract.signatures import file_signature
from opendsec_server.contract.states import TERMINAL, EndReason, State
from opendsec_server.images.store import ImageStore

from . import cgroups, kept, limits, process, syscalls
from .agent_path import install_agent
from .backends import Backend
from .backends.choice import find_backends
from .container import seccomp
from .container.bundle import HostTraits
from .container.runtime import OciRuntime
from .exec import exec_events, unpack_archive
from .groups import Groups
from .groups import membership as group_membership
from .hooks.admit import Admit
from .images import Images
from .journal import Journal, Record, Transition
from .lifecycle import Lifecycle
from .load import MachineLoad
from .marks import KeptMarks
from .memory.swap import PauseSwap
from .metrics import Metrics
from .network import policy as network_policy
from .network.hostside import HostSide
from .network.slots import SlotMakerError, SlotPool
from .packing import Packing
from .paths import NodePaths
from .reconcile import adopt_living, remove_dead
from .sandbox import Sandbox, status_of, usage_of
from .services import Services
from .snapshots import Snapshots
from .start import StartPrograms, check_ready
from .storage.idmap import user_namespaces_usable
from .storage.layers import LayerMounts
from .storage.pool import DiskPool
from .suspend import Suspend
from .usage import Meters

log = structlog.get_logger("opendsec.node")

_DRAIN_S = 10.0
_LINKS_GONE_S = 5.0


class Node:
    """One machine's sandboxes. Make it with ``await Node.start(config)``.

    The process should have called ``mountns.enter_private_mount_namespace()`` before.
    """

    def __init__(
        self,
        services: Services,
        node_id: str,
        host: HostSide,
        lifecycle: Lifecycle,
        suspend: Suspend,
        backends: Mapping[str, Backend],
    ) -> None:
        self._services = services
        self._node_id = node_id
        self._host = host
        self._lifecycle = lifecycle
        self._suspend = suspend
        self._backends = backends
        self._images = Images(
            services.store,
            services.config,
            self._images_in_use,
            services.layers.forget,
            services.layers.resolve_remote,
        )
        self._packing = Packing(services, lifecycle, suspend, self._images)
        self._load = MachineLoad()
        self._marks = KeptMarks(services.paths.marks)
        self._metrics = Metrics(services.cgroups, services.pool, services.meters, self._running)
        self._housekeeper: asyncio.Task[None] | None = None

    # --- start and stop -----------------------------------------------------

    @classmethod
    async def start(cls, config: Config) -> Node:
        """Open the journal, prepare the host, take back what still runs.

        Raises:
            ConfigError: something is missing or contradicts; the message says what to do.
        """
        if os.geteuid() != 0:
            raise ConfigError("the node needs root: namespaces, mounts and nftables")
        paths = NodePaths.of(config)
        _make_directories(paths)
        journal = Journal(paths.journal, paths.lock)
        try:
            services = await _prepare(config, paths, journal)
        except BaseException:
            await journal.close()
            raise
        try:
            return await cls._bring_up(services)
        except BaseException:
            await services.slots.stop()
            await services.slots.maker.stop()
            await journal.close()
            raise

    @classmethod
    async def _bring_up(cls, services: Services) -> Node:
        journal, slots = services.journal, services.slots
        host = HostSide(services.config, journal, slots.maker)
        await host.set_up()
        services.cgroups.prepare()
        await PauseSwap(services.config).set_up()
        slots.route_localnet = host.route_localnet
        services.groups.resolvers = lambda: host.resolvers
        backends = await find_backends(services)
        lifecycle = Lifecycle(
            journal,
            backends,
            services.snapshots,
            Admit(services),
            StartPrograms(services.paths),
            min(services.config.sandboxes_max, slots.capacity),
        )
        suspend = Suspend(services, lifecycle)
        lifecycle.time_out = suspend.time_out
        lifecycle.lost_memory = suspend.lost_memory
        services.snapshots.memory_in_use = lifecycle.memory_in_use
        await services.layers.lazy.adopt()
        found = await adopt_living(services, lifecycle)
        await services.groups.adopt([lifecycle.boxes[name] for name in found.adopted])
        await remove_dead(services, lifecycle, suspend, found)
        await services.snapshots.load()
        await slots.start(found.slots)
        node = cls(services, await journal.node_id(), host, lifecycle, suspend, backends)
        await node._images.sweep()
        node._metrics.start()
        node._housekeeper = asyncio.create_task(node._keep_house(), name="housekeeping")
        log.info("node is up", node_id=node.node_id, adopted=len(found.adopted))
        return node

    async def stop(self) -> None:
        """End the daemon's part. Sandboxes and their processes go on."""
        await self._lifecycle.drain(_DRAIN_S)
        if self._housekeeper is not None:
            self._housekeeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._housekeeper
        await self._metrics.stop()
        await self._services.layers.lazy.stop()
        self._services.groups.stop()
        self._lifecycle.let_go()
        await self._services.slots.stop()
        await self._services.slots.maker.stop()
        await self._services.journal.close()

    async def purge(self) -> None:
        """End every sandbox and remove everything of this instance from the machine: disk pool,
        links, tables, groups, mounts, run files. Journal and images stay. The node is stopped."""
        await asyncio.gather(
            *(self._lifecycle.kill(box, EndReason.KILLED) for box in self._boxes())
        )
        await self._lifecycle.drain(_DRAIN_S)
        await self._lifecycle.retry_leftovers()
        services = self._services
        await services.slots.stop()
        left = await services.slots.wait_links_gone(_LINKS_GONE_S)
        if left:
            await services.slots.maker.ask("unlink", links=left)
        await self._host.tear_down()
        await PauseSwap(services.config).tear_down()
        services.cgroups.remove_root()
        await self.stop()
        services.layers.unmount_all()
        await services.pool.remove()
        paths = services.paths
        for directory in (paths.bundles, paths.machine_runs, paths.runtime_root):
            shutil.rmtree(directory, ignore_errors=True)
        services.traits.agent.unlink(missing_ok=True)

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(limits.HOUSEKEEPING_INTERVAL_S)
            try:
                await self._services.journal.prune(time.time())
                await self._lifecycle.retry_leftovers()
                await self._services.snapshots.sweep()
                for backend in self._backends.values():
                    await backend.keep_house(self._lifecycle.memory_in_use())
                await self._host.refresh_resolvers()
                self._services.runtime.reap_strays()
                await asyncio.to_thread(self._services.pool.sweep_qgroups)
            except Exception:
                log.exception("housekeeping")

    # --- helpers ------------------------------------------------------------

    def _boxes(self) -> list[Sandbox]:
        return list(self._lifecycle.boxes.values())

    def _running(self) -> list[Sandbox]:
        return [box for box in self._boxes() if box.state is State.RUNNING]

    def _images_in_use(self) -> set[str]:
        boxes = {box.spec.image for box in self._boxes() if box.state not in TERMINAL}
        return boxes | self._services.snapshots.images()

    def _live(self, sandbox_id: str) -> Sandbox:
        box = self._lifecycle.boxes.get(sandbox_id)
        if box is None or box.state in TERMINAL:
            raise SandboxNotFound(f"sandbox {sandbox_id} was not found")
        return box

    async def _record(self, sandbox_id: str) -> Record:
        box = self._lifecycle.boxes.get(sandbox_id)
        if box is not None:
            return box.record
        record = await self._services.journal.find(sandbox_id)
        if record is None:
            raise SandboxNotFound(f"sandbox {sandbox_id} was not found")
        return record

    # --- NodeClient ---------------------------------------------------------

    @property
    def images(self) -> NodeImages:
        """See ``NodeClient.images``."""
        return self._images

    @property
    def node_id(self) -> str:
        """What its sandboxes' ids begin with, after the ``i``."""
        return self._node_id

    async def info(self) -> NodeInfo:
        """Identity, abilities, load."""
        usage = self._services.pool.usage()
        memory_total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return NodeInfo(
            node_id=self._node_id,
            hostname=platform.node(),
            version=__version__,
            backends=tuple(backend.info for backend in self._backends.values()),
            cpu_count=os.cpu_count() or 1,
            memory_total_bytes=memory_total,
            disk_total_bytes=usage.total_bytes,
            disk_free_bytes=usage.free_bytes,
            sandboxes=len(self._lifecycle.boxes),
            sandboxes_max=min(self._services.config.sandboxes_max, self._services.slots.capacity),
            features=self._features(),
            load=self._load.now(),
            labels=self._marks.now.labels,
            draining=self._marks.now.draining,
        )

    async def set_marks(
        self, *, labels: dict[str, str] | None = None, draining: bool | None = None
    ) -> NodeInfo:
        """See ``NodeClient.set_marks``."""
        await asyncio.to_thread(self._marks.set, labels=labels, draining=draining)
        return await self.info()

    def _features(self) -> dict[str, Any]:
        services = self._services
        return {
            "kernel": platform.release(),
            "cgroup": services.cgroups.kind,
            "swap_limit": services.cgroups.swap_limited(),
            "oci_runtime": services.runtime.name,
            "oci_runtime_version": services.runtime.version,
            "user_namespaces": services.slots.user_namespaces,
            "idmapped_mounts": services.slots.user_namespaces,
            "quota": f"btrfs-{services.pool.quota_kind}",
            "erofs": services.layers.how,
            "agent": str(services.traits.agent),
            "slots_ready": services.slots.ready,
            "teardowns_unfinished": self._lifecycle.leftovers,
            "pause_swap": PauseSwap(services.config).features(),
            **self._host.features(),
        }

    async def create(self, spec: SandboxSpec) -> SandboxStatus:
        """See ``NodeClient.create``."""
        if spec.backend not in self._backends:
            raise NotSupported(
                f"this node does not offer the backend {spec.backend!r}",
                details={"available": list(self._backends)},
            )
        if self._marks.now.draining and spec.sandbox_id not in self._lifecycle.boxes:
            raise NodeFull(
                "the node is draining: it takes no new sandboxes",
                remediation="Use another node, or end the drain (`opendsec node undrain`).",
            )
        if spec.snapshot_id is not None and spec.sandbox_id not in self._lifecycle.boxes:
            spec = self._of_snapshot(spec)
        if spec.vm is not None and not self._backends[spec.backend].info.capabilities.disk_images:
            raise NotSupported(f"`vm` is not for sandboxes of the backend {spec.backend!r}")
        network_policy.check(spec.network)
        if spec.group is not None:
            group_membership.check(spec.group)
        if spec.start is not None:
            check_ready(spec.start.ready)
        if not self._backends[spec.backend].info.capabilities.disk_images:
            spec = await self._pinned(spec)
        return status_of(await self._lifecycle.create(spec))

    async def _pinned(self, spec: SandboxSpec) -> SandboxSpec:
        """By digest: what a name means later is not what this sandbox stands on."""
        try:
            image = await self._images.get(spec.image)
        except ImageNotFound as exc:
            raise TemplateNotFound(f"image {spec.image!r} is not on this node") from exc
        if self._backends[spec.backend].info.capabilities.own_kernel:
            # A machine has fewer places for disks than an overlay for layers.
            image = await self._images.fewer_layers(image, limits.MACHINE_LAYERS_MAX)
        return msgspec.structs.replace(spec, image=image.digest)

    def _of_snapshot(self, spec: SandboxSpec) -> SandboxSpec:
        assert spec.snapshot_id is not None
        snapshot = self._services.snapshots.get(spec.snapshot_id)
        if snapshot.backend != spec.backend:
            raise NotSupported(
                f"a snapshot of a {snapshot.backend} cannot start a {spec.backend}",
                remediation=f"Ask for the backend {snapshot.backend!r}, or name none.",
            )
        if spec.vm is not None and spec.vm != snapshot.vm:
            raise NotSupported(
                "a machine started from a snapshot is made as the one that was saved",
                remediation="Leave `vm` out.",
            )
        return msgspec.structs.replace(
            spec, vm=snapshot.vm, start=snapshot.start if spec.start is None else spec.start
        )

    async def get(self, sandbox_id: str) -> SandboxStatus:
        """See ``NodeClient.get``."""
        return self._status_of(await self._record(sandbox_id))

    async def list(self) -> list[SandboxStatus]:
        """See ``NodeClient.list``."""
        return [self._status_of(box.record) for box in self._boxes() if box.state not in TERMINAL]

    def _status_of(self, record: Record) -> SandboxStatus:
        status = status_of(record)
        if status.state is not State.RUNNING:
            return status
        trouble = self._services.layers.trouble(record.spec.image)
        return status if trouble is None else msgspec.structs.replace(status, message=trouble)

    async def kill(self, sandbox_id: str, reason: EndReason = EndReason.KILLED) -> SandboxStatus:
        """See ``NodeClient.kill``."""
        box = self._lifecycle.boxes.get(sandbox_id)
        if box is None:
            return await self.get(sandbox_id)
        await self._lifecycle.kill(box, reason)
        return status_of(box.record)

    async def pause(self, sandbox_id: str, mode: StateMode = "full") -> PauseReport:
        """See ``NodeClient.pause``."""
        return await self._suspend.pause(self._live(sandbox_id), mode)

    async def resume(
        self, sandbox_id: str, *, end_at: float, reboot: bool = False
    ) -> SandboxStatus:
        """See ``NodeClient.resume``."""
        box = self._live(sandbox_id)
        await self._suspend.resume(box, end_at, reboot=reboot)
        return status_of(box.record)

    async def snapshot(
        self,
        sandbox_id: str,
        snapshot_id: str,
        *,
        mode: StateMode = "full",
        ephemeral: bool = False,
    ) -> Snapshot:
        """See ``NodeClient.snapshot``."""
        box = self._live(sandbox_id)
        return await self._suspend.snapshot(box, snapshot_id, mode, ephemeral=ephemeral)

    async def snapshots(self) -> SnapshotList:
        """See ``NodeClient.snapshots``."""
        return self._services.snapshots.all()

    async def delete_snapshot(self, snapshot_id: str) -> bool:
        """See ``NodeClient.delete_snapshot``."""
        return await self._services.snapshots.remove(snapshot_id)

    async def set_end_at(
        self, sandbox_id: str, end_at: float, *, only_extend: bool = False
    ) -> SandboxStatus:
        """See ``NodeClient.set_end_at``."""
        box = self._live(sandbox_id)
        await self._lifecycle.extend(box, end_at, only_extend=only_extend)
        return status_of(box.record)

    async def set_network(self, sandbox_id: str, policy: NetworkPolicy) -> None:
        """See ``NodeClient.set_network``."""
        network_policy.check(policy)
        box = self._live(sandbox_id)
        if box.state is not State.RUNNING or box.slot is None:
            raise StateConflict(
                f"sandbox {sandbox_id} is {box.state}", details={"state": str(box.state)}
            )
        try:
            await self._services.slots.set_policy(box.slot, policy)
        except SlotMakerError as exc:
            raise SandboxStartFailed(f"the network policy was refused: {exc}") from exc
        box.record.spec = msgspec.structs.replace(box.spec, network=policy)
        await self._services.journal.save(box.record, None)

    async def route(self, sandbox_id: str) -> Route:
        """See ``NodeClient.route``."""
        box, _address = await self._reachable(sandbox_id)
        return _route_of(box)

    async def _reachable(self, sandbox_id: str) -> tuple[Sandbox, str]:
        """A running sandbox and its address. Waits while it is starting, pausing or resuming."""
        box = self._live(sandbox_id)
        if box.start_task is not None and not box.start_task.done():
            await asyncio.shield(box.start_task)
            box = self._live(sandbox_id)
        while (operation := box.operation) is not None:
            await asyncio.wait({operation.task})
        box = self._live(sandbox_id)
        if box.state is not State.RUNNING or box.slot is None:
            raise StateConflict(
                f"sandbox {sandbox_id} is {box.state}", details={"state": str(box.state)}
            )
        return box, box.slot.address

    async def console(self, sandbox_id: str, kind: ConsoleKind) -> str:
        """See ``NodeClient.console``."""
        box, backend = self._with_console(sandbox_id)
        if box.state is not State.RUNNING:
            raise StateConflict(
                f"sandbox {sandbox_id} is {box.state}", details={"state": str(box.state)}
            )
        return str(backend.console_socket(box, kind))

    async def console_tail(self, sandbox_id: str) -> str:
        """See ``NodeClient.console_tail``."""
        box, backend = self._with_console(sandbox_id)
        return backend.console_tail(box)

    def _with_console(self, sandbox_id: str) -> tuple[Sandbox, Backend]:
        box = self._live(sandbox_id)
        backend = self._lifecycle.backend_of(box)
        if not backend.info.capabilities.console:
            raise NotSupported(f"a {box.spec.backend} has no console")
        return box, backend

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
        box, address = await self._reachable(sandbox_id)
        events = exec_events(
            address, box.spec, argv, user=user, workdir=workdir, env=env, timeout_s=timeout_s
        )
        async with contextlib.aclosing(events):
            async for event in events:
                yield event

    async def start_kept(self, sandbox_id: str, tag: str, order: ProgramOrder) -> None:
        """See ``NodeClient.start_kept``."""
        box, address = await self._reachable(sandbox_id)
        await kept.start(address, box.spec, tag, order)

    async def kept(
        self, sandbox_id: str, tag: str, *, wait_s: float = 0.0, void: bool = False
    ) -> KeptProgram:
        """See ``NodeClient.kept``."""
        box, address = await self._reachable(sandbox_id)
        program = await kept.ask(address, box.spec, tag, wait_s=wait_s, void=void)
        if box.spec.backend != "container":
            # Only its own kernel knows.
            return program
        # Read after the answer: what was killed before it is counted.
        kills = await asyncio.to_thread(self._services.cgroups.oom_kills, sandbox_id)
        return msgspec.structs.replace(program, oom_total=kills)

    async def forget_kept(self, sandbox_id: str, tag: str) -> None:
        """See ``NodeClient.forget_kept``."""
        box, address = await self._reachable(sandbox_id)
        await kept.forget(address, box.spec, tag)

    async def write_file(
        self, sandbox_id: str, path: str, data: bytes, *, user: str | None = None
    ) -> None:
        """See ``NodeClient.write_file``."""
        box, address = await self._reachable(sandbox_id)
        await kept.write_file(address, box.spec, path, data, user=user)

    async def read_file(
        self, sandbox_id: str, path: str, *, user: str | None = None, bytes_max: int
    ) -> bytes:
        """See ``NodeClient.read_file``."""
        box, address = await self._reachable(sandbox_id)
        return await kept.read_file(address, box.spec, path, user=user, bytes_max=bytes_max)

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
        """See ``NodeClient.unpack``."""
        box, address = await self._reachable(sandbox_id)
        await unpack_archive(
            address, box.spec, Path(archive), sources=sources, target=target, user=user, mode=mode
        )

    async def pack(self, sandbox_id: str, options: PackOptions) -> ImageInfo:
        """See ``NodeClient.pack``."""
        return await self._packing.pack(self._live(sandbox_id), options)

    async def route_by_signature(
        self, *, path: str, operation: str, username: str, signature: str, expiration: str | None
    ) -> Route:
        """See ``NodeClient.route_by_signature``."""
        for box in self._running():
            wanted = file_signature(path, operation, username, box.spec.access_token, expiration)
            if hmac.compare_digest(wanted.encode(), signature.encode()):
                return _route_of(box)
        raise SandboxNotFound("no running sandbox made this signature")

    async def metrics(self, sandbox_id: str, start: float, end: float) -> list[MetricSample]:  # type: ignore[valid-type]
        """See ``NodeClient.metrics``."""
        box = self._lifecycle.boxes.get(sandbox_id)
        if box is None:
            await self._record(sandbox_id)
            return []
        return await self._metrics.of(box, start, end)

    async def usage(self, sandbox_ids: Sequence[str]) -> dict[str, SandboxUsage]:
        """See ``NodeClient.usage``."""
        boxes = self._lifecycle.boxes
        live = [boxes[name] for name in sandbox_ids if name in boxes]
        found = await self._services.meters.of(live)
        ended = [name for name in sandbox_ids if name not in boxes]
        if ended:
            meters = await self._services.journal.ended_meters(ended)
            shown = ((name, usage_of(meter)) for name, meter in meters.items())
            found.update({name: usage for name, usage in shown if usage is not None})
        return found

    async def transitions(self, sandbox_id: str) -> list[Transition]:  # type: ignore[valid-type]
        """Kept changes of state, oldest first.

        Raises:
            SandboxNotFound: the journal does not know it.
        """
        await self._record(sandbox_id)
        return await self._services.journal.transitions(sandbox_id)

    def events(self) -> AsyncIterator[NodeEvent]:
        """See ``NodeClient.events``."""
        return self._lifecycle.events.subscribe()


def _route_of(box: Sandbox) -> Route:
    assert box.slot is not None
    spec = box.spec
    return Route(
        sandbox_id=spec.sandbox_id,
        state=box.state,
        address=box.slot.address,
        agent_port=network_policy.AGENT_PORT,
        control_token=spec.control_token,
        traffic_token=spec.traffic_token,
        allow_public_traffic=spec.network.allow_public_traffic,
        mask_request_host=spec.network.mask_request_host,
        https_ports=spec.network.https_ports,
    )


async def _prepare(config: Config, paths: NodePaths, journal: Journal) -> Services:
    syscalls.set_child_subreaper()
    nofile_max = _raise_open_files()
    runtime = OciRuntime(config.oci_runtime, paths.runtime_root)
    await runtime.probe()
    groups = cgroups.detect(f"/opendsec-{config.instance}", cgroups.host_mount_table())
    pool = DiskPool(paths, config.disk_pool_mb)
    await pool.open()
    store = ImageStore(paths.images)
    slots = SlotPool(
        instance=config.instance,
        network_cidr=config.network_cidr,
        ready_wanted=config.slots_ready,
        capacity=config.sandboxes_max + config.slots_ready + limits.SLOTS_RESTING,
        user_namespaces=config.user_namespaces == "auto" and user_namespaces_usable(paths),
    )
    slots.maker.start()
    return Services(
        config=config,
        paths=paths,
        journal=journal,
        pool=pool,
        snapshots=Snapshots(journal, pool),
        store=store,
        layers=LayerMounts(store),
        slots=slots,
        groups=Groups(slots),
        runtime=runtime,
        cgroups=groups,
        traits=HostTraits(
            agent=install_agent(find_agent(config), paths.run),
            swap_limited=groups.swap_limited(),
            cgroup_root=groups.root,
            nofile_max=nofile_max,
            seccomp_bpf=_compiled_filter(runtime),
        ),
        boot_id=process.boot_id(),
        meters=Meters(groups, pool, slots, journal),
    )


def _compiled_filter(runtime: OciRuntime) -> str | None:
    if not runtime.takes_compiled_seccomp:
        return None
    try:
        return seccomp.compiled()
    except seccomp.SeccompError as exc:
        log.warning("the runtime compiles the filter at every start", error=str(exc))
        return None


def _make_directories(paths: NodePaths) -> None:
    """The runtime reaches a bundle with the sandbox's own ids, so the way there may be walked,
    though not read, by all."""
    for directory, mode in (
        (paths.state, 0o700),
        (paths.run, 0o711),
        (paths.bundles, 0o711),
        (paths.machine_runs, 0o711),
        (paths.runtime_root, 0o700),
    ):
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(mode)
    for parent in paths.run.resolve().parents:
        if not parent.stat().st_mode & stat.S_IXOTH:
            raise ConfigError(
                f"run_dir {paths.run} lies below {parent}, which other users cannot enter; "
                "sandboxes run as such users. Choose a run_dir like /run/opendsec."
            )


def _raise_open_files() -> int:
    """Each live sandbox takes two descriptors; returns what a sandbox itself may have."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < limits.NOFILE_MAX:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limits.NOFILE_MAX, limits.NOFILE_MAX))
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return min(hard, limits.NOFILE_MAX)
