# SPDX-License-Identifier: AGPL-3.0-only
"""Short programs started from the event loop, and processes known by pidfd.

posix_spawn(3) costs a third of asyncio's subprocess support and needs no child watcher; waiting
is by pidfd, so no other library's ``waitpid`` can take the result.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

OUTPUT_BYTES_MAX = 64 * 1024
"""What is kept of a program's output for error messages."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How a program ended.

    Attributes:
        code: Exit status, or minus the signal's number.
        output: Tail of standard output and standard error together.
    """

    code: int
    output: str


class ProgramTimeout(Exception):
    """The program did not end in time; it was killed."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process that cannot be confused with a later one of the same number.

    Attributes:
        pid: Its number in the daemon's pid namespace.
        start_ticks: Field 22 of /proc/pid/stat, clock ticks since boot.
        boot_id: The kernel's boot id; ticks alone repeat after a reboot.
    """

    pid: int
    start_ticks: int
    boot_id: str


def boot_id() -> str:
    """The running kernel's boot id."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks_of(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def is_alive(identity: ProcessIdentity, current_boot_id: str) -> bool:
    """Whether exactly this process still runs."""
    return (
        identity.boot_id == current_boot_id and start_ticks_of(identity.pid) == identity.start_ticks
    )


def open_identity(identity: ProcessIdentity, current_boot_id: str) -> int | None:
    """A pidfd of exactly this process; None when it is gone."""
    if identity.boot_id != current_boot_id:
        return None
    try:
        pidfd = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return None
    # Checked after opening: from here on the descriptor means this process for ever.
    if is_alive(identity, current_boot_id):
        return pidfd
    os.close(pidfd)
    return None


async def finish_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run in a thread; when cancelled, still wait for its end before giving way.

    What cleans up after a cancelled step must not run beside it.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def wait_readable(fd: int, timeout_s: float | None) -> bool:
    """Wait until a descriptor is readable; False after ``timeout_s`` seconds."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, _settle, ready)
    try:
        await asyncio.wait_for(ready, timeout_s)
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(fd)
    return True


def has_ended(pidfd: int) -> bool:
    """Whether the process behind a pidfd has ended. Does not block."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def reap(pidfd: int) -> int | None:
    """Exit code (or minus the signal) of an ended child; None if it is not our child."""
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def send_signal(pidfd: int, number: signal.Signals) -> None:
    """Signal exactly this process; no error when it is gone."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


async def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    output_path: Path | None = None,
    env: dict[str, str] | None = None,
    stdin_fd: int | None = None,
) -> Finished:
    """Run a program to its end.

    Args:
        argv: Program (path or name) and arguments.
        timeout_s: After it the program is killed.
        output_path: Where its output (and that of what it leaves running) goes, appended;
            None: kept in memory.
        env: Environment; None: ours.
        stdin_fd: What it reads as its standard input; None: nothing.

    Raises:
        FileNotFoundError: no such program.
        ProgramTimeout: killed at the time-out.
    """
    out_fd = (
        os.memfd_create("output")
        if output_path is None
        else os.open(output_path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o600)
    )
    try:
        start = os.lseek(out_fd, 0, os.SEEK_END)
        pid = _spawn(argv, out_fd, os.environ if env is None else env, stdin_fd)
        _awaited.add(pid)
        try:
            code = await _wait(pid, argv[0], timeout_s)
        finally:
            _awaited.discard(pid)
        return Finished(code, _tail(out_fd, start))
    finally:
        os.close(out_fd)


_awaited: set[int] = set()
"""Programs that somebody here waits for."""

_STRAYS_PER_CALL_MAX = 64


def reap_strays(name: str) -> None:
    """Reap ended processes called ``name…`` that nobody waits for.

    As child subreaper (prctl(2)) we inherit what our programs leave: crun forks once more when it
    detaches, and that process would stay a zombie. Others' children are left to their owners, so
    this stops at the first ended process it does not know.
    """
    for _ in range(_STRAYS_PER_CALL_MAX):
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in _awaited:
            return
        try:
            command = Path(f"/proc/{ended.si_pid}/comm").read_text()
        except OSError:
            return
        if not command.startswith(name):
            return
        os.waitid(os.P_PID, ended.si_pid, os.WEXITED | os.WNOHANG)


def _spawn(argv: Sequence[str], out_fd: int, env: Mapping[str, str], stdin_fd: int | None) -> int:
    return os.posix_spawnp(
        argv[0],
        list(argv),
        env,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
            if stdin_fd is None
            else (os.POSIX_SPAWN_DUP2, stdin_fd, 0),
            (os.POSIX_SPAWN_DUP2, out_fd, 1),
            (os.POSIX_SPAWN_DUP2, out_fd, 2),
        ],
        setsid=True,
    )


def _kill_and_reap(pidfd: int) -> None:
    send_signal(pidfd, signal.SIGKILL)
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED)


async def _wait(pid: int, name: str, timeout_s: float) -> int:
    pidfd = os.pidfd_open(pid)
    try:
        timed_out = not await wait_readable(pidfd, timeout_s)
        if timed_out:
            send_signal(pidfd, signal.SIGKILL)
            await wait_readable(pidfd, None)
        code = reap(pidfd)
    except BaseException:
        # Cancelled: whoever cleans up next must not meet the program still at work.
        _kill_and_reap(pidfd)
        raise
    finally:
        os.close(pidfd)
    if timed_out:
        raise ProgramTimeout(f"{name} did not end within {timeout_s:.1f} s")
    if code is None:
        raise ChildProcessError(f"the end of {name} was taken by somebody else")
    return code


def _tail(fd: int, start: int) -> str:
    size = os.fstat(fd).st_size
    at = max(start, size - OUTPUT_BYTES_MAX)
    return os.pread(fd, OUTPUT_BYTES_MAX, at).decode(errors="replace").strip()
