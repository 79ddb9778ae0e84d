# SPDX-License-Identifier: AGPL-3.0-only
"""The example environment, by Gymnasium's own checker, and many at once."""

from __future__ import annotations

import asyncio

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from opendsec import AsyncClient, InvalidRequest, SandboxNotFound
from opendsec.adapters.gymnasium import AsyncShellEnv, ShellEnv


def test_gymnasiums_own_checker() -> None:
    env = ShellEnv(memory_mb=64, setup=["echo $SEED > /seed"])
    check_env(env, skip_render_check=True)
    env.reset(seed=3)
    observation, reward, *ended, _info = env.step("cat /seed; echo x >&2; exit 3")
    assert (observation["stdout"], observation["stderr"]) == ("3\n", "x\n")
    assert (observation["exit_code"], reward, ended) == (3, 0.0, [False, False])
    env.close()
    env.close()


def test_a_vector_of_them() -> None:
    gymnasium.register("opendsec/Shell-v0", entry_point="opendsec.adapters.gymnasium:ShellEnv")
    both = gymnasium.make_vec(
        "opendsec/Shell-v0", num_envs=2, vectorization_mode="sync", memory_mb=64
    )
    both.reset()
    assert both.step(["echo a", "echo b"])[0]["stdout"] == ("a\n", "b\n")
    both.close()


async def test_episodes_wait_side_by_side() -> None:
    async def episode(client: AsyncClient, answer: int) -> list[float]:
        env = AsyncShellEnv(
            'test "$(cat /home/user/answer)" = 42', client=client, steps_max=2, memory_mb=64
        )
        await env.reset()
        rewards = []
        for action in ("true", f"sleep 0.1; echo {answer} > answer"):
            _, reward, terminated, truncated, _ = await env.step(action)
            rewards.append(reward)
        assert (terminated, truncated) == (answer == 42, answer != 42)
        await env.close()
        return rewards

    async with AsyncClient() as client:
        found = await asyncio.gather(*(episode(client, answer) for answer in (41, 42, 43)))
    assert found == [[0, 0], [0, 1], [0, 0]]


async def test_a_failure_is_no_reward() -> None:
    env = AsyncShellEnv(memory_mb=64, command_timeout_s=0.5)
    with pytest.raises(InvalidRequest, match="reset"):
        await env.step("true")
    await env.reset()
    observation, *_ = await env.step("echo begun; sleep 30")
    assert (observation["exit_code"], observation["stdout"]) == (124, "begun\n")
    await env.sandbox.kill()
    with pytest.raises(SandboxNotFound):
        await env.step("true")
    await env.close()
