# SPDX-License-Identifier: Apache-2.0
"""One context: a Jupyter kernel, and what runs in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import tempfile
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager

from .languages import Language
from .messages import Line, error, line_of

READY_TIMEOUT_S = 60.0
KEEPALIVE_S = 5.0
"""A line at least this often: only a write shows that the client is gone."""
ALIVE_CHECK_S = 1.0
INTERRUPT_WAIT_S = 10.0
"""How long interrupted code may go on before its kernel is started anew."""
_SOCKETS = tempfile.mkdtemp(prefix="kernels-")
LINES_WAITING_MAX = 1_000
"""Of a client that reads slowly; the kernel's output waits then."""


class Context:
    """A kernel of its own. One piece of code runs at a time; others wait for their turn."""

    def __init__(self, language: Language, cwd: str) -> None:
        self.context_id = str(uuid.uuid4())
        self.language = language
        self.cwd = cwd
        self._manager = AsyncKernelManager(
            kernel_name=language.kernel, transport=language.transport
        )
        if language.transport == "ipc":
            # The beginning of its sockets' paths.
            self._manager.ip = f"{_SOCKETS}/{self.context_id}"
        self._client: AsyncKernelClient | None = None
        self._turn = asyncio.Lock()
        self._env: dict[str, str] = {}
        """What of the sandbox's environment the kernel has."""
        self._leftovers: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the kernel.

        Raises:
            RuntimeError: it did not come up.
        """
        await self._manager.start_kernel(
            cwd=self.cwd,
            extra_arguments=[*self.language.arguments],
            env={**os.environ, "NO_COLOR": "1"},
        )
        await self._connect()

    async def close(self) -> None:
        """End the kernel, whatever it does."""
        self._disconnect()
        await self._manager.shutdown_kernel(now=True)

    async def restart(self) -> None:
        """Start the kernel anew; nothing of it is kept."""
        self._disconnect()
        await self._manager.restart_kernel(now=True)
        await self._connect()

    async def execute(
        self, code: str, *, sandbox_env: Mapping[str, str], env: Mapping[str, str]
    ) -> AsyncGenerator[Line, None]:
        """Run code and yield what it does. Left early, the code is interrupted.

        Args:
            code: In the context's language.
            sandbox_env: Variables of the sandbox: kept by the kernel.
            env: Variables for this code only.
        """
        lines: asyncio.Queue[Line | None] = asyncio.Queue(LINES_WAITING_MAX)
        running = asyncio.Event()
        task = asyncio.create_task(self._run(code, sandbox_env, env, lines, running))
        try:
            while True:
                try:
                    line = await asyncio.wait_for(lines.get(), KEEPALIVE_S)
                except TimeoutError:
                    yield {"type": "keepalive"}
                    continue
                if line is None:
                    break
                yield line
            await task
        finally:
            if not task.done():
                leftover = asyncio.create_task(self._abandon(task, lines, running))
                self._leftovers.add(leftover)
                leftover.add_done_callback(self._leftovers.discard)

    # --- one execution ------------------------------------------------------

    async def _run(
        self,
        code: str,
        sandbox_env: Mapping[str, str],
        env: Mapping[str, str],
        lines: asyncio.Queue[Line | None],
        running: asyncio.Event,
    ) -> None:
        try:
            async with self._turn:
                await self._set_env(sandbox_env, env)
                running.set()
                async for line in self._exchange(code):
                    await lines.put(line)
                running.clear()
                # Back to what the sandbox has, before others have their turn.
                await self._silently({key: self._env.get(key) for key in env})
            await lines.put({"type": "end_of_execution"})
        except Exception as exc:
            await lines.put(error(type(exc).__name__, str(exc), []))
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await lines.put(None)

    async def _abandon(
        self, task: asyncio.Task[None], lines: asyncio.Queue[Line | None], running: asyncio.Event
    ) -> None:
        """Nobody waits for it any more: interrupt it, so that the next one has its turn."""
        if not running.is_set():
            task.cancel()
        else:
            await self._manager.interrupt_kernel()
            end = asyncio.get_running_loop().time() + INTERRUPT_WAIT_S
            while not task.done() and asyncio.get_running_loop().time() < end:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(lines.get(), 0.1)
            if not task.done():
                task.cancel()
                await self.restart()
        await asyncio.gather(task, return_exceptions=True)

    async def _set_env(self, sandbox_env: Mapping[str, str], env: Mapping[str, str]) -> None:
        kept = {key: value for key, value in sandbox_env.items() if self._env.get(key) != value}
        await self._silently({**kept, **env})
        self._env.update(kept)

    async def _silently(self, env: Mapping[str, str | None]) -> None:
        if env:
            async for _ in self._exchange(self.language.set_env(env), silent=True):
                pass

    async def _exchange(self, code: str, *, silent: bool = False) -> AsyncIterator[Line]:
        client = self._client
        if client is None:
            raise RuntimeError("the context has ended")
        message_id = client.execute(code, silent=silent, store_history=not silent)
        last = message_id
        failed = False
        while True:
            try:
                message = await client.get_iopub_msg(timeout=ALIVE_CHECK_S)
            except queue.Empty:
                if await self._manager.is_alive():
                    continue
                # The next code finds a fresh kernel.
                await self.restart()
                yield error("KernelDied", "the process that ran the code has died", [])
                return
            parent = message["parent_header"].get("msg_id")
            if message["msg_type"] == "status":
                if parent != last or message["content"]["execution_state"] != "idle":
                    continue
                if self.language.barrier is None or last != message_id:
                    break
                last = client.execute(self.language.barrier, silent=True, store_history=False)
            elif parent == message_id:
                failed = failed or message["msg_type"] == "error"
                line = line_of(message)
                if line is not None:
                    yield line
        reply = await self._reply(client, message_id)
        if reply.get("status") == "error" and not failed:
            # Some kernels say it here only.
            yield error(
                reply.get("ename", "Error"), reply.get("evalue", ""), reply.get("traceback") or []
            )

    async def _reply(self, client: AsyncKernelClient, message_id: str) -> dict[str, Any]:
        with contextlib.suppress(queue.Empty):
            while True:
                message = await client.get_shell_msg(timeout=ALIVE_CHECK_S)
                if message["parent_header"].get("msg_id") == message_id:
                    return dict(message["content"])
        return {}

    # --- the kernel ---------------------------------------------------------

    async def _connect(self) -> None:
        client = self._manager.client()
        client.start_channels()
        try:
            await client.wait_for_ready(timeout=READY_TIMEOUT_S)
        except RuntimeError:
            client.stop_channels()
            await self._manager.shutdown_kernel(now=True)
            raise
        self._client = client
        self._env = {}

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.stop_channels()
            self._client = None
