# SPDX-License-Identifier: Apache-2.0
"""What a rollout is made of, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from ._errors import ArtifactsRefused, CommandTimeout, Fault, OpendsecError
from ._models import CommandResult, NetworkPolicy

T = TypeVar("T")

Phase = Literal["create", "setup", "rollout", "collect", "verify", "done"]

CLOSED = NetworkPolicy(internet=False)
OPEN = NetworkPolicy()


@dataclass(frozen=True, kw_only=True)
class Verifier:
    """How the work of an agent is looked at, where the agent cannot reach.

    It runs in a sandbox of its own, made from what the setup left, after the agent's has ended.
    Only the paths in ``take`` come over: as plain files, directories and links. ``files`` were
    never in the agent's sandbox.

    Attributes:
        command: A line for ``bash -l -c``, or a program with its arguments.
        files: Contents by path: tests, and what is secret. They are written last, so they win.
        take: Absolute paths of files and directories of the agent's work.
        take_max_bytes: Of each of them.
        network: What is open meanwhile.
        user: Account that the command runs as. None: the template's default.
        cwd: Where it runs.
        env: Added to the sandbox's environment.
        timeout_s: It is killed after so many seconds.
        create: Arguments of ``create`` for its sandbox, instead of those of the rollout's; the
            setup is not repeated there.
        isolated: False: run in the agent's own sandbox, with all that it left running. Quicker, and
            only for agents that do not cheat.
    """

    command: str | Sequence[str]
    files: Mapping[str, bytes | str] = field(default_factory=dict)
    take: Sequence[str] = ()
    take_max_bytes: int = 1024 * 1024 * 1024
    network: NetworkPolicy = CLOSED
    user: str | None = None
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 900.0
    create: Mapping[str, Any] | None = None
    isolated: bool = True


@dataclass(kw_only=True)
class RolloutOutcome(Generic[T]):
    """How far a rollout came, and whose fault it is that it came no further.

    Attributes:
        phase: The last that was begun; ``done`` if all were passed.
        value: What the agent returned. None before.
        verified: How the verifier's command ended. None if there is none, or it did not end.
        error: What stopped it. None: nothing did.
        sandbox_id: The agent's sandbox. None: it was not created.
        verifier_id: The verifier's sandbox.
    """

    phase: Phase = "create"
    value: T | None = None
    verified: CommandResult | None = None
    error: OpendsecError | None = None
    sandbox_id: str | None = None
    verifier_id: str | None = None

    @property
    def fault(self) -> Fault | None:
        """Who stopped it: ``user``, ``platform`` or ``capacity``. None: it was not stopped."""
        return None if self.error is None else self.error.fault

    @property
    def passed(self) -> bool | None:
        """Whether the agent's work is right. None: that is not known, and must not be scored.

        It is not known if the platform failed or had no room, or if the setup or the verifier
        cannot work, which is not the agent's. What the agent left that cannot be taken, or that
        lets the verifier's command run out of time, is the agent's failure.
        """
        if self.verified is not None:
            return self.verified.ok
        if self.fault != "user":
            return None
        blamed = self.phase in ("rollout", "collect") or (
            self.phase == "verify" and isinstance(self.error, (ArtifactsRefused, CommandTimeout))
        )
        return False if blamed else None
