# SPDX-License-Identifier: AGPL-3.0-only
"""MicroVMs: a kernel of their own, the same layers and guest agent as containers."""

from __future__ import annotations

import os
from pathlib import Path

from opendsec_server.contract.errors import AgentUnresponsive, SnapshotFailed
from opendsec_server.contract.limits import START_BUDGET_S
from opendsec_server.contract.node import BackendInfo, Capabilities, ConsoleKind, SandboxSpec
from opendsec_server.contract.states import EndReason, State
from opendsec_server.node import agent_client, limits
from opendsec_server.node.adoption import take_back
from opendsec_server.node.hooks import Hook, set_up, tear_down
from opendsec_server.node.hooks.admit import Admit
from opendsec_server.node.hooks.machine import Machine
from opendsec_server.node.hooks.machine_agent import MachineAgent
from opendsec_server.node.hooks.machine_disk import MachineDisk
from opendsec_server.node.hooks.machine_network import MachineNetwork
from opendsec_server.node.hooks.metering import Metering
from opendsec_server.node.hooks.names import Names
from opendsec_server.node.journal import Record
from opendsec_server.node.machines.guests import Guests
from opendsec_server.node.machines.identity import fresh_identity
from opendsec_server.node.machines.templates import Templates, copy_disk
from opendsec_server.node.paths import MACHINE_DISK
from opendsec_server.node.process import finish_in_thread
from opendsec_server.node.sandbox import Sandbox
from opendsec_server.node.services import Services
from opendsec_server.node.start import StartPrograms
from opendsec_server.node.vmm.base import Vmm

CAPABILITIES = Capabilities(
    own_kernel=True,
    memory_snapshot=True,
    pause_survives_reboot=True,
    fork=True,
    disk_images=False,
    console=False,
    passthrough=False,
)

_CONSOLE_CHARS_MAX = 2_000
_PANIC = "Kernel panic"
_INIT_FAILED = "opendsec-init:"


class MicrovmBackend:
    """See ``Backend``. A full pause saves memory to disk and ends the VMM.

    Args:
        services: The node's parts.
        vmm: A driver that was probed.
        guests: The kernel and initramfs that machines boot.
    """

    def __init__(self, services: Services, vmm: Vmm, guests: Guests) -> None:
        self._services = services
        self._paths = services.paths
        self._cgroups = services.cgroups
        self._vmm = vmm
        self._programs = StartPrograms(services.paths)
        info = vmm.info
        self.info = BackendInfo(
            name="microvm",
            capabilities=CAPABILITIES,
            accelerator=info.accelerator,
            vmm=f"{info.name} {info.version}",
        )
        # A KVM of a host that is itself emulated is as slow as an emulated guest.
        emulated = info.accelerator == "tcg" or "QEMU TCG CPU" in info.cpu_model
        self.budget_s = limits.START_BUDGET_EMULATED_S if emulated else START_BUDGET_S
        self.templates = Templates(services, vmm, guests)
        self.templates.make = self._make_template
        self.keep_hooks: list[Hook] = [Admit(services), MachineDisk(services, self.templates)]
        self.run_hooks: list[Hook] = [
            MachineNetwork(services),
            Machine(services, vmm, guests),
            MachineAgent(services, vmm, self.budget_s),
            Names(services),
            Metering(services),
        ]

    async def _make_template(self, spec: SandboxSpec, target: Path) -> None:
        """Boot, wait for the agent, save. The machine belongs to nobody: what is left of it after
        a crash is removed at the next start."""
        box = Sandbox(Record(spec=spec, state=State.STARTING, end_at=spec.end_at))
        hooks = [*self.keep_hooks, *self.run_hooks]
        try:
            await set_up(hooks, box, lambda: None)
            await self._programs.run(box)
            await self.settle(box)
            await self._vmm.freeze(self._paths.machine_run(spec.sandbox_id))
            await self.save_memory(box, target / "memory")
            disk = self._paths.machine_disk(spec.sandbox_id)
            await finish_in_thread(copy_disk, disk, target / MACHINE_DISK)
            await self.seal_memory(target / "memory", durable=True)
        finally:
            await tear_down(hooks, box)

    async def prepare(self, box: Sandbox) -> None:
        """The template, in whose memory the start command runs already."""
        if box.spec.snapshot_id is None:
            await self.templates.get(box)

    async def settle(self, box: Sandbox) -> None:
        """The guest writes its caches to its disk."""
        assert box.slot is not None
        try:
            await agent_client.sync(box.slot.address, box.spec.control_token)
        except AgentUnresponsive as exc:
            raise SnapshotFailed(f"the guest did not write out its disk: {exc.message}") from exc

    async def disconnect(self, box: Sandbox) -> None:
        """The agent ends its streams."""
        if box.slot is None:
            return
        box.asleep = True
        try:
            await agent_client.terminate(box.slot.address, box.spec.control_token, "paused")
        except AgentUnresponsive:
            return

    async def freeze(self, box: Sandbox) -> None:
        """By the VMM."""
        await self._vmm.freeze(self._paths.machine_run(box.sandbox_id))

    async def thaw(self, box: Sandbox) -> None:
        """By the VMM; an agent that was put to sleep is woken."""
        await self._vmm.thaw(self._paths.machine_run(box.sandbox_id))
        if box.asleep and box.slot is not None:
            await agent_client.initialise(
                box.slot.address,
                box.spec,
                timeout_s=limits.AGENT_CALL_TIMEOUT_S,
                give_up=lambda: None,
                fresh=fresh_identity(box, resumed=True),
                connect_timeout_s=limits.GUEST_CONNECT_TIMEOUT_S,
            )
            box.asleep = False

    async def save_memory(self, box: Sandbox, target: Path) -> int:
        """By the VMM; what did not change since it was started is shared with that."""
        assert box.record.pid is not None
        await finish_in_thread(target.mkdir, 0o700)
        base = None if box.record.ram_base is None else Path(box.record.ram_base)
        run_dir = self._paths.machine_run(box.sandbox_id)
        saved = await self._vmm.save(run_dir, box.record.pid, target, base)
        return saved.dirty_bytes

    async def seal_memory(self, directory: Path, *, durable: bool) -> None:
        """By the VMM."""
        await self._vmm.seal(directory, durable=durable)

    async def check_memory(self, directory: Path) -> None:
        """By the VMM."""
        await self._vmm.check(directory)

    async def put_away(self, box: Sandbox) -> None:
        """Never asked: a paused machine does not run."""

    async def take_up(self, box: Sandbox) -> None:
        """Never asked."""

    def memory_bytes(self, box: Sandbox) -> int:
        """What the VMM's control group is charged."""
        now = self._cgroups.memory_now(box.sandbox_id)
        return 0 if now is None else now.resident

    def adopt(self, box: Sandbox) -> bool:
        """By process identity and control group; the VMM goes on listening to us."""
        if not take_back(self._services, box):
            return False
        assert box.record.pid is not None
        self._vmm.adopt(self._paths.machine_run(box.sandbox_id), box.record.pid)
        return True

    def memory_kills(self, box: Sandbox) -> int:
        """Its own kernel's kills are not seen here; the control group's are those of its VMM."""
        return 0

    def why_ended(self, box: Sandbox) -> tuple[EndReason, str]:
        """By what the guest said last, or by how the VMM ended."""
        console = self._vmm.console_tail(self._paths.machine_run(box.sandbox_id)).strip()
        tail = console[-_CONSOLE_CHARS_MAX:]
        panic = console.find(_PANIC)
        if panic >= 0:
            # From the panic on: what follows it may be longer than the tail.
            words = console[panic : panic + _CONSOLE_CHARS_MAX]
            return EndReason.KERNEL_PANIC, f"the guest's kernel panicked; its console: {words}"
        if _INIT_FAILED in console:
            return EndReason.EXITED, f"the guest's init gave up; its console ends: {tail}"
        kills = self._cgroups.oom_kills(box.sandbox_id)
        if kills:
            return (
                EndReason.VMM_FAILED,
                f"the VMM was killed at the memory limit of its control group ({kills} kills)",
            )
        code = box.exit_code
        if code is not None and code < 0:
            return EndReason.VMM_FAILED, f"the VMM was ended by signal {-code}"
        if code:
            return EndReason.VMM_FAILED, f"the VMM exited with status {code}; console: {tail}"
        return EndReason.EXITED, "the guest powered itself off"

    def console_socket(self, box: Sandbox, kind: ConsoleKind) -> Path:
        """Never asked: its console is for the kernel's last words."""
        raise NotImplementedError

    def console_tail(self, box: Sandbox) -> str:
        """From the VMM."""
        return self._vmm.console_tail(self._paths.machine_run(box.sandbox_id))

    async def keep_house(self, memory_in_use: set[Path]) -> None:
        """Old templates go."""
        await finish_in_thread(self.templates.sweep, memory_in_use)

    def known(self) -> set[str]:
        """Control groups and run directories."""
        runs = self._paths.machine_runs
        names = {entry.name for entry in os.scandir(runs)} if runs.is_dir() else set()
        return self._cgroups.known() | names
