# SPDX-License-Identifier: AGPL-3.0-only
"""Programs whose outcome a guest agent keeps until it was taken, as control plane and node speak
of them.

Each has a tag, chosen by who starts it. A tag starts a program once in the life of a guest agent:
an answer that was lost is asked for again, and never made again.
"""

from __future__ import annotations

from typing import Literal

import msgspec

KEPT_OUTPUT_BYTES_MAX = 1_024 * 1_024
"""What can be kept of one output of one program."""

KeptState = Literal["missing", "void", "starting", "running", "ended"]
"""``missing``: the agent does not know the tag. ``void``: it was used or ruled out, and starts
nothing any more."""


class ProgramOrder(msgspec.Struct, kw_only=True, frozen=True):
    """What is to be run."""

    argv: tuple[str, ...]
    instance: str | None = None
    """The guest agent that is meant; see ``KeptProgram.instance``. None: any."""
    user: str | None = None
    """None: the sandbox's default user."""
    workdir: str | None = None
    """None: the sandbox's default, else the user's home."""
    env: dict[str, str] = {}
    """Added to the sandbox's."""
    timeout_s: float
    """After it the whole process tree is killed."""
    output_bytes: int
    """Kept of each of its two outputs: the first half and the last half."""


class KeptOutput(msgspec.Struct, kw_only=True, frozen=True):
    """The beginning and the end of what was written. Together they are all of it, unless
    ``bytes_total`` is more than they have."""

    head: bytes = b""
    tail: bytes = b""
    bytes_total: int = 0

    @property
    def cut_bytes(self) -> int:
        """How much is missing between head and tail."""
        return self.bytes_total - len(self.head) - len(self.tail)


class KeptProgram(msgspec.Struct, kw_only=True, frozen=True):
    """What a guest agent says of a tag."""

    state: KeptState
    instance: str
    """Names the life of the agent. One that was started anew has another, and knows no tags."""
    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    lost: bool = False
    """It ended, and how could not be learnt."""
    oom_kills: int = 0
    """Programs that a virtual machine's kernel killed for memory while it ran."""
    oom_total: int = 0
    """Programs that the host's kernel has killed at the sandbox's memory limit so far."""
    stdout: KeptOutput = KeptOutput()
    stderr: KeptOutput = KeptOutput()
