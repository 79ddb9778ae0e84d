# SPDX-License-Identifier: AGPL-3.0-only
"""What a backend must do. Everything else about a sandbox is the same for all of them.

A backend makes sandboxes by two lists of hooks (``node.hooks``), and can stop and continue one
that runs. States, journal, deadlines, concurrency and errors towards callers are not its
business: ``node.lifecycle`` and ``node.suspend`` do those, and call each method below only in the
state that it names, one at a time per sandbox.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from opendsec_server.contract.node import BackendInfo, ConsoleKind
from opendsec_server.contract.states import EndReason
from opendsec_server.node.hooks import Hook
from opendsec_server.node.sandbox import Sandbox


class Backend(Protocol):
    """One way to run sandboxes.

    Attributes:
        info: Name, capabilities as data, accelerator, VMM. Fixed while the node runs.
        keep_hooks: What lasts from create to end: admission, disk.
        budget_s: How long a start or resume may take.
        run_hooks: What exists only while it runs or is frozen: network slot, root file system,
            process, agent. Together they must leave ``box.pidfd`` and ``box.record.pid`` set:
            the process whose end is the sandbox's end. With ``box.restore_from`` set they
            continue the memory saved in that directory instead of starting anew.
    """

    @property
    def info(self) -> BackendInfo: ...

    @property
    def budget_s(self) -> float: ...

    @property
    def keep_hooks(self) -> Sequence[Hook]: ...

    @property
    def run_hooks(self) -> Sequence[Hook]: ...

    async def prepare(self, box: Sandbox) -> None:
        """Before a sandbox with a start command waits for its turn: make what it shares with
        others. May take as long as its start command, and do nothing.

        Raises:
            OpendsecError: a sandbox of this kind cannot be started.
        """

    async def settle(self, box: Sandbox) -> None:
        """Before its run ends but its disk is kept: have everything written to the disk.

        Raises:
            OpendsecError: it cannot be made sure.
        """

    async def disconnect(self, box: Sandbox) -> None:
        """Before a running sandbox is put away: end the streams of its clients properly.

        A guest that does not answer is no error: its clients see their connections break.
        """

    async def freeze(self, box: Sandbox) -> None:
        """Stop every instruction of a running sandbox. Idempotent.

        Raises:
            SnapshotFailed: it could not be stopped; it runs on.
        """

    async def thaw(self, box: Sandbox) -> None:
        """Undo ``freeze``. Idempotent, also on a sandbox that runs.

        Raises:
            ResumeFailed: it could not be continued.
        """

    async def save_memory(self, box: Sandbox, target: Path) -> int:
        """Write a frozen sandbox's memory and devices into a new directory; it stays frozen.

        Only with the capability ``memory_snapshot``.

        Returns:
            Bytes that were written to disk.

        Raises:
            SnapshotFailed: it could not be written; ``target`` may hold a part of it.
            NodeFull: no room on the disk.
        """

    async def seal_memory(self, directory: Path, *, durable: bool) -> None:
        """Complete what ``save_memory`` wrote, with checksums; the sandbox may run meanwhile.

        Args:
            directory: Its ``target``.
            durable: Wait until all of it is on the medium.

        Raises:
            SnapshotFailed: the disk failed or is full.
        """

    async def check_memory(self, directory: Path) -> None:
        """See whether saved memory is whole and fits this machine.

        Raises:
            SnapshotDamaged: a part is missing, cut short or changed.
            SnapshotIncompatible: it was made by another VMM, CPU model, kernel or agent.
        """

    async def put_away(self, box: Sandbox) -> None:
        """Give back the memory of a frozen sandbox that is paused in place.

        Only without the capability ``pause_survives_reboot``.
        """

    async def take_up(self, box: Sandbox) -> None:
        """Undo ``put_away``, before ``thaw``."""

    def memory_bytes(self, box: Sandbox) -> int:
        """Memory of the host that a sandbox's run takes now; 0 when it has none."""

    def adopt(self, box: Sandbox) -> bool:
        """After a restart of the daemon: open what it holds of a sandbox that still runs.

        Returns:
            Whether exactly the journalled process lives, as this sandbox's. If not, nothing
            is held.
        """

    def why_ended(self, box: Sandbox) -> tuple[EndReason, str]:
        """Why its first process ended by itself, with the evidence in a sentence."""

    def memory_kills(self, box: Sandbox) -> int:
        """How many of its programs the kernel killed at its memory limit, as far as that is seen
        from outside."""

    def console_socket(self, box: Sandbox, kind: ConsoleKind) -> Path:
        """Where a running sandbox's console or screen is served. Only with the capability
        ``console``."""

    def console_tail(self, box: Sandbox) -> str:
        """The end of what its console printed. Only with the capability ``console``."""

    async def keep_house(self, memory_in_use: set[Path]) -> None:
        """Now and then: remove what is kept for speed only and not needed.

        Args:
            memory_in_use: Directories of saved memory that running machines map.
        """

    def known(self) -> set[str]:
        """Ids of all sandboxes of which it finds something on the machine (disks excepted)."""
