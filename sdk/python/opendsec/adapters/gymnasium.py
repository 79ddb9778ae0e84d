# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="import-not-found"
"""A small environment to begin with: a shell in a sandbox, in the manner of Gymnasium.

``AsyncShellEnv`` has Gymnasium's methods with ``await``: thousands of episodes wait side by side in
one process, as they do when a model thinks. ``ShellEnv`` is a real ``gymnasium.Env`` around it, for
wrappers and vector environments::

    env = AsyncShellEnv(check="test \\"$(cat answer)\\" = 42", memory_mb=128)
    observation, info = await env.reset()
    while True:
        action = await policy(observation)
        observation, reward, terminated, truncated, info = await env.step(action)
        if terminated or truncated:
            break
    await env.close()

A failure of the platform is raised as ``OpendsecError``: it is no observation, and has no reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import string
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from opendsec import (
    AsyncClient,
    AsyncSandbox,
    CommandTimeout,
    InvalidRequest,
    NetworkPolicy,
    OpendsecError,
)

Observation = dict[str, Any]

TEXT_MAX = 16 * 1024
"""Characters of an action, and of each text of an observation."""
TIMED_OUT = 124
"""Exit code of a command that ran out of time, as by timeout(1)."""
CLOSED = NetworkPolicy(internet=False)


class AnyText(spaces.Space[str]):  # type: ignore[misc]
    """Any text up to a length. Gymnasium's own ``Text`` needs a list of its characters."""

    def __init__(self, length_max: int = TEXT_MAX, seed: int | None = None) -> None:
        self.length_max = length_max
        super().__init__(seed=seed)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Some printable characters."""
        letters = string.ascii_letters + string.digits + " "
        size = int(self.np_random.integers(1, 32))
        return "".join(letters[i] for i in self.np_random.integers(0, len(letters), size))

    def contains(self, x: Any) -> bool:
        """Whether it is text, and not too long."""
        return isinstance(x, str) and len(x) <= self.length_max

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyText) and other.length_max == self.length_max

    def __repr__(self) -> str:
        return f"AnyText({self.length_max})"


class AsyncShellEnv:
    """Commands are actions, their output and exit code are observations.

    Args:
        check: After each action, this command decides in the sandbox: exit code 0 ends the episode
            with reward 1. It runs as root. None: nothing is rewarded.
        setup: Commands that begin an episode, run as root with the network of ``setup_network``.
        setup_network: What is open while they run.
        network: What is open for the actions.
        steps_max: An episode is truncated after so many actions.
        command_timeout_s: An action is killed after so many seconds.
        client: None: one of its own, made from the environment.
        create: Further arguments of ``AsyncClient.create``.
    """

    action_space = AnyText()
    observation_space = spaces.Dict(
        {"stdout": AnyText(), "stderr": AnyText(), "exit_code": spaces.Discrete(256)}
    )

    def __init__(
        self,
        check: str | None = None,
        *,
        setup: Sequence[str] = (),
        setup_network: NetworkPolicy = CLOSED,
        network: NetworkPolicy = CLOSED,
        steps_max: int = 50,
        command_timeout_s: float = 60.0,
        client: AsyncClient | None = None,
        **create: Any,
    ) -> None:
        self._check = check
        self._setup = setup
        self._setup_network = setup_network
        self._network = network
        self._steps_max = steps_max
        self._command_timeout_s = command_timeout_s
        self._given = client
        self._own: AsyncClient | None = None
        self._create = create
        self._steps = 0
        self._sandbox: AsyncSandbox | None = None

    @property
    def sandbox(self) -> AsyncSandbox:
        """The episode's sandbox.

        Raises:
            InvalidRequest: ``reset`` was not called.
        """
        if self._sandbox is None:
            raise InvalidRequest("There is no episode: call reset() first.")
        return self._sandbox

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode in a new sandbox; that of the last one is ended.

        Args:
            seed: Given to the setup as ``SEED``.
            options: Arguments of ``create`` for this episode.
        """
        await self._end()
        first = self._setup_network if self._setup else self._network
        arguments = {"labels": ["gymnasium"], **self._create, **(options or {}), "network": first}
        self._sandbox = sandbox = await self._client.create(**arguments)
        try:
            env = {} if seed is None else {"SEED": str(seed)}
            for command in self._setup:
                await sandbox.exec(command, user="root", env=env, check=True)
            if first != self._network:
                await sandbox.set_network(self._network)
        except BaseException:
            await self._end()
            raise
        self._steps = 0
        info = {"sandbox_id": sandbox.sandbox_id}
        return {"stdout": "", "stderr": "", "exit_code": np.int64(0)}, info

    async def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Run a line of bash.

        Raises:
            OpendsecError: the sandbox or the platform failed; the step has no result.
        """
        self._steps += 1
        code = TIMED_OUT
        try:
            result = await self.sandbox.exec(
                action, timeout_s=self._command_timeout_s, output_limit_bytes=4 * TEXT_MAX
            )
            stdout, stderr, code = result.stdout, result.stderr, result.exit_code
        except CommandTimeout as error:
            stdout, stderr = error.stdout, error.stderr
        solved = False
        if self._check is not None:
            solved = (await self.sandbox.exec(self._check, user="root", timeout_s=60)).ok
        observation = {
            "stdout": stdout[:TEXT_MAX],
            "stderr": stderr[:TEXT_MAX],
            "exit_code": np.int64(code & 0xFF),
        }
        truncated = not solved and self._steps >= self._steps_max
        return observation, float(solved), solved, truncated, {"steps": self._steps}

    async def close(self) -> None:
        """End the episode and its sandbox."""
        try:
            await self._end()
        finally:
            own, self._own = self._own, None
            if own is not None:
                await own.aclose()

    @property
    def _client(self) -> AsyncClient:
        if self._given is not None:
            return self._given
        if self._own is None:
            self._own = AsyncClient()
        return self._own

    async def _end(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.kill()


class ShellEnv(gymnasium.Env[Observation, str]):  # type: ignore[misc]
    """``AsyncShellEnv`` with Gymnasium's own, synchronous interface.

    Args:
        arguments: Those of ``AsyncShellEnv``, but ``client``.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium's interface

    def __init__(self, render_mode: str | None = None, **arguments: Any) -> None:
        self.render_mode = render_mode
        self.action_space = AnyText()
        self.observation_space = AsyncShellEnv.observation_space
        self._runner = asyncio.Runner()
        self._closed = False
        self._env = AsyncShellEnv(**arguments)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode in a new sandbox."""
        super().reset(seed=seed)
        return self._runner.run(self._env.reset(seed=seed, options=options))

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Run a line of bash."""
        return self._runner.run(self._env.step(action))

    def close(self) -> None:
        """End the episode and its sandbox."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OpendsecError):  # The sandbox's time runs out in any case.
            self._runner.run(self._env.close())
        self._runner.close()
