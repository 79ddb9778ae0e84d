# SPDX-License-Identifier: Apache-2.0
# Generated from _async/_rollout.py by scripts/generate_sync.py. Do not edit.
# ruff: noqa: RUF100, SIM117, UP028
"""A rollout in one call: setup with a network, agent without, a verifier that it cannot reach."""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, Any, TypeVar

from opendsec import _archive, _artifacts
from opendsec._errors import ArtifactsRefused, FileNotFound, InvalidRequest, OpendsecError
from opendsec._models import NetworkPolicy
from opendsec._rollout_models import CLOSED, OPEN, RolloutOutcome, Verifier

from ._concurrency import in_thread
from ._process import Command, kill_quietly

if TYPE_CHECKING:
    from ._client import Client
    from ._sandbox import Sandbox

T = TypeVar("T")


class Rollout:
    """A kind of rollout, to be run as often as you like::

        rollout = Rollout(
            client,
            image="python:3.12-slim",
            setup=["pip install pytest"],
            verifier=Verifier(
                command="pytest /tests", files={"/tests/test_it.py": TESTS}, take=["/work"]
            ),
        )
        outcome = rollout.run(agent)
        if outcome.passed is not None:
            score(outcome.passed)

    Args:
        client: Sandboxes are made with it.
        setup: Commands that prepare the sandbox, in order; each must end with 0.
        setup_user: Account that they run as.
        setup_timeout_s: Each is killed after so many seconds.
        setup_network: What is open while they run.
        rollout_network: What is open while the agent runs.
        verifier: How the work is looked at. None: not at all.
        create: Arguments of ``Client.create``, but ``network`` and ``idempotency_key``.

    Raises:
        InvalidRequest: an argument makes no sense.
    """

    def __init__(
        self,
        client: Client,
        *,
        setup: Sequence[Command] = (),
        setup_user: str | None = "root",
        setup_timeout_s: float | None = 900.0,
        setup_network: NetworkPolicy = OPEN,
        rollout_network: NetworkPolicy = CLOSED,
        verifier: Verifier | None = None,
        **create: Any,
    ) -> None:
        if isinstance(setup, str):
            raise InvalidRequest("setup is a list of commands.")
        for name in ("network", "idempotency_key"):
            if name in create:
                raise InvalidRequest(f"{name} cannot be given: a rollout has its own.")
        for path in () if verifier is None else verifier.take:
            if posixpath.normpath(path) != path or path in ("/", "//") or path[0] != "/":
                raise InvalidRequest(f"take: {path!r} is no plain absolute path below the root.")
        self._client = client
        self._setup = setup
        self._setup_user = setup_user
        self._setup_timeout_s = setup_timeout_s
        self._setup_network = setup_network
        self._rollout_network = rollout_network
        self._verifier = verifier
        self._create = create

    def run(self, agent: Callable[[Sandbox], T]) -> RolloutOutcome[T]:
        """Run it once. The sandboxes are ended in any case.

        Args:
            agent: Called with the sandbox, when the setup's network is closed.

        Returns:
            How far it came. An ``OpendsecError``, also one that ``agent`` raised, is in it.

        Raises:
            Exception: what else ``agent`` raised.
        """
        outcome: RolloutOutcome[T] = RolloutOutcome()
        with _Taken() as taken:
            try:
                self._run(agent, outcome, taken)
            except OpendsecError as error:
                outcome.error = error
        return outcome

    def _run(
        self,
        agent: Callable[[Sandbox], T],
        outcome: RolloutOutcome[T],
        taken: _Taken,
    ) -> None:
        verifier = self._verifier
        apart = verifier is not None and verifier.isolated
        start: str | None = None
        try:
            first = self._setup_network if self._setup else self._rollout_network
            with self._client.create(network=first, **self._create) as sandbox:
                outcome.sandbox_id = sandbox.sandbox_id
                if self._setup:
                    outcome.phase = "setup"
                    for command in self._setup:
                        sandbox.exec(
                            command,
                            user=self._setup_user,
                            timeout_s=self._setup_timeout_s,
                            check=True,
                        )
                    if verifier is not None and apart and verifier.create is None:
                        start = (sandbox.snapshot(mode="filesystem")).snapshot_id
                    # An agent never runs with more than it may have: a refusal ends the rollout.
                    sandbox.set_network(self._rollout_network)
                outcome.phase = "rollout"
                outcome.value = agent(sandbox)
                if verifier is not None and not apart:
                    outcome.phase = "verify"
                    sandbox.set_network(verifier.network)
                    _verify(sandbox, verifier, outcome)
                elif verifier is not None:
                    outcome.phase = "collect"
                    for path in verifier.take:
                        taken.add(path, _take(sandbox, path, verifier.take_max_bytes))
            if verifier is not None and apart:
                outcome.phase = "verify"
                create = dict(self._create if verifier.create is None else verifier.create)
                if start is not None:
                    create = _from_snapshot(create, start)
                with self._client.create(**{**create, "network": verifier.network}) as other:
                    outcome.verifier_id = other.sandbox_id
                    for path, archive in taken.archives:
                        _put(other, path, archive)
                    _verify(other, verifier, outcome)
            outcome.phase = "done"
        finally:
            if start is not None:
                with contextlib.suppress(OpendsecError):  # It is listed, and can be removed later.
                    self._client.snapshots.delete(start)


class _Taken:
    """Archives of an agent's work on this machine; gone at the end of the block."""

    def __init__(self) -> None:
        self.archives: list[tuple[str, IO[bytes]]] = []

    def __enter__(self) -> _Taken:
        return self

    def __exit__(self, *_: object) -> None:
        for _path, archive in self.archives:
            archive.close()

    def add(self, path: str, archive: IO[bytes]) -> None:
        self.archives.append((path, archive))


def _from_snapshot(create: dict[str, Any], snapshot_id: str) -> dict[str, Any]:
    """Arguments of ``create`` for a copy of what a setup left."""
    source = ("template", "image", "layers", "start_image", "ready", "disk_mb", "vm")
    kept = {name: value for name, value in create.items() if name not in source}
    return {**kept, "template": snapshot_id}


def _take(sandbox: Sandbox, path: str, bytes_max: int) -> IO[bytes]:
    """An archive of a path of the agent's sandbox, cleaned."""
    parent, name = posixpath.split(path)
    if not sandbox.files.exists(path, user="root"):
        raise FileNotFound(f"The agent left no {path}.")
    # Headers are not counted as content, and padding may double small files.
    limit_bytes = 2 * bytes_max + 64 * 1024 * 1024
    process = sandbox.spawn(
        ["tar", "-cf", "-", "-C", parent, "--", name],
        user="root",
        cwd="/",
        output_limit_bytes=64 * 1024,
    )
    with process:
        with _archive.spool() as raw:
            try:
                size_bytes = 0
                for event in process:
                    if event.stream == "stdout":
                        size_bytes += len(event.data)
                        if size_bytes > limit_bytes:
                            raise ArtifactsRefused(f"{path} is larger than {bytes_max} bytes.")
                        raw.write(event.data)
            except BaseException:
                kill_quietly(process)
                raise
            return in_thread(lambda: _artifacts.cleaned(raw, name, bytes_max=bytes_max))


def _put(sandbox: Sandbox, path: str, archive: IO[bytes]) -> None:
    """Put taken work into the verifier's sandbox, instead of what is there."""
    parent = posixpath.dirname(path)
    sandbox.files.make_dir(parent, exist_ok=True, user="root")
    sandbox.exec(["rm", "-rf", "--", path], user="root", cwd="/", check=True)
    done = sandbox.exec(["tar", "-xof", "-", "-C", parent], user="root", cwd="/", stdin=archive)
    if not done.ok:
        raise ArtifactsRefused(f"{path} cannot be unpacked: {done.stderr.strip()[-500:]}")


def _verify(sandbox: Sandbox, verifier: Verifier, outcome: RolloutOutcome[Any]) -> None:
    if verifier.files:
        # What the agent left there, such as a link, must not decide where a test is written.
        sandbox.exec(["rm", "-rf", "--", *verifier.files], user="root", cwd="/", check=True)
        sandbox.files.write_many(verifier.files.items(), user="root")
    outcome.verified = sandbox.exec(
        verifier.command,
        user=verifier.user,
        cwd=verifier.cwd,
        env=verifier.env,
        timeout_s=verifier.timeout_s,
    )
