# SPDX-License-Identifier: AGPL-3.0-only
"""What sandboxes of the fake node can run. Tests only.

The last argument is the command; each of its lines is one of ``echo TEXT``, ``warn TEXT`` (to
stderr), ``write PATH TEXT``, ``append PATH TEXT``, ``remove PATH``, ``need PATH`` (fails if it is
missing), ``env NAME`` (prints it), ``whoami``, ``pwd``, ``exit CODE``, ``die SIGNAL``, ``block``
(until killed) or anything else, which does nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from opendsec_server.contract.images import ExecEvent


async def run(
    command: str,
    disk: dict[str, str],
    *,
    user: str,
    workdir: str | None,
    env: dict[str, str],
    ended: asyncio.Event,
) -> AsyncIterator[ExecEvent]:
    """Run a command on a sandbox's files."""
    for line in command.replace(" && ", "\n").splitlines():
        verb, _, rest = line.strip().partition(" ")
        path, _, text = rest.partition(" ")
        out: str | None = None
        if verb == "echo":
            out = rest
        elif verb == "warn":
            yield ExecEvent(kind="stderr", data=f"{rest}\n".encode())
        elif verb == "write":
            disk[path] = text
        elif verb == "append":
            disk[path] = disk.get(path, "") + text
        elif verb == "remove":
            disk.pop(path, None)
        elif verb == "need" and rest not in disk:
            yield ExecEvent(kind="stderr", data=f"{rest} is missing\n".encode())
            yield ExecEvent(kind="end", exit_code=1)
            return
        elif verb == "env":
            out = env.get(rest, "")
        elif verb == "whoami":
            out = user
        elif verb == "pwd":
            out = workdir or "-"
        elif verb == "exit":
            yield ExecEvent(kind="end", exit_code=int(rest))
            return
        elif verb == "die":
            yield ExecEvent(kind="end", signal=int(rest))
            return
        elif verb == "block":
            await ended.wait()
        if out is not None:
            yield ExecEvent(kind="stdout", data=f"{out}\n".encode())
        await asyncio.sleep(0)
    yield ExecEvent(kind="end", exit_code=0)
