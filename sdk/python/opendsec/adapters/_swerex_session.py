# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="import-not-found, import-untyped"
"""SWE-ReX's bash session, with its shell on a terminal in a sandbox.

SWE-ReX means its session to run inside of the sandbox: before each command it pastes the command
into a shell of its own machine to check the syntax. Here that machine would be the caller's, so
that check is made in the sandbox, and nothing of the command is ever given to a local shell.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import pexpect
from pexpect.spawnbase import SpawnBase
from swerex.exceptions import (
    BashIncorrectSyntaxError,
    CommandTimeoutError,
    NoExitCodeError,
    SwerexException,
)
from swerex.runtime.abstract import (
    BashAction,
    BashObservation,
    CloseBashSessionResponse,
    CreateBashSessionRequest,
    CreateBashSessionResponse,
)
from swerex.runtime.local import BashSession, _split_bash_command, _strip_control_chars

from opendsec import AsyncPty, AsyncSandbox, OpendsecError

T = TypeVar("T")

OUTPUT_CHARS_MAX = 16 * 1024 * 1024
"""Of one command. The text is searched for the prompt again and again, and kept in memory."""
_READ_CHARS = 64 * 1024
_START_S = 10.0
_SETTLE_S = 0.3
_EXIT_CODE_S = 5.0
_SHELL = ["/bin/sh", "-c", "stty -echo; exec bash"]
_CODE = re.compile(r"EXITCODESTART([0-9]+)")


class Shell(SpawnBase):  # type: ignore[misc]
    """What ``pexpect`` expects of a child, for a terminal in a sandbox.

    Its methods block, and so belong in another thread than that of the event loop, which reads the
    terminal.
    """

    def __init__(self, pty: AsyncPty, sandbox: AsyncSandbox, user: str | None) -> None:
        super().__init__(maxread=_READ_CHARS, encoding="utf-8", codec_errors="backslashreplace")
        self._pty = pty
        self._sandbox = sandbox
        self._user = user
        self._loop = asyncio.get_running_loop()
        self._arrived = threading.Condition()
        self._text = ""
        self._ended: str | None = None
        self._read_chars = 0
        self._pump = self._loop.create_task(self._read_terminal())

    async def _read_terminal(self) -> None:
        why = "the shell has ended"
        try:
            async for event in self._pty:
                text = self._decoder.decode(event.data)
                with self._arrived:
                    # What nobody waits for (a job in the background) must not fill the memory.
                    self._text = (self._text + text)[-OUTPUT_CHARS_MAX:]
                    self._arrived.notify_all()
        except OpendsecError as error:
            why = error.message
        finally:
            with self._arrived:
                self._ended = why
                self._arrived.notify_all()

    async def aclose(self) -> None:
        """End the shell and all that runs in it."""
        try:
            await self._pty.kill()
        except OpendsecError:
            pass  # It has ended, or the sandbox has.
        finally:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
            await self._pty.disconnect()

    # --- pexpect's side, in a worker thread ----------------------------------------

    def expect(self, *args: Any, **kwargs: Any) -> int:
        """Wait for one of some patterns."""
        self._read_chars = 0
        found: int = super().expect(*args, **kwargs)
        return found

    def read_nonblocking(self, size: int = 1, timeout: float | None = None) -> str:
        """Text that has come, at most ``size`` characters; waits for ``timeout`` seconds."""
        if timeout == -1:
            timeout = self.timeout
        with self._arrived:
            self._arrived.wait_for(lambda: self._text or self._ended, timeout)
            text, self._text = self._text[:size], self._text[size:]
            if not text and self._ended:
                self.flag_eof = True
                raise pexpect.EOF(f"The session is over: {self._ended}.")
        if not text:
            raise pexpect.TIMEOUT("Timeout exceeded.")
        self._read_chars += len(text)
        if self._read_chars > OUTPUT_CHARS_MAX:
            raise SwerexException(f"The command wrote more than {OUTPUT_CHARS_MAX} characters.")
        return text

    def send(self, text: str) -> int:
        """Type text."""
        self._wait(self._pty.write(text))
        return len(text)

    def sendline(self, text: str = "") -> int:
        """Type a line."""
        return self.send(text + "\n")

    def sendcontrol(self, char: str) -> int:
        """Press a control key."""
        return self.send(chr(ord(char.lower()) - ord("a") + 1))

    def sendintr(self) -> None:
        """Press Ctrl-C."""
        self.sendcontrol("c")

    def setecho(self, state: bool) -> None:
        """Let the terminal show what is typed, or not."""
        flag = "echo" if state else "-echo"
        stty = ["stty", "-F", f"/proc/{self._pty.pid}/fd/0", flag]
        self._wait(self._sandbox.exec(stty, user=self._user, timeout_s=_START_S))

    def waitnoecho(self, timeout: float = -1) -> bool:
        """``setecho`` has waited already."""
        return True

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        pending: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return pending.result()


class SandboxSession(BashSession):  # type: ignore[misc]
    """One shell. Its ``run`` blocks, as that of SWE-ReX does: see ``blocking``."""

    _shell: Shell | None

    def __init__(
        self,
        request: CreateBashSessionRequest,
        sandbox: AsyncSandbox,
        user: str | None,
        cwd: str | None,
        env: dict[str, str],
    ) -> None:
        super().__init__(request)
        self._sandbox = sandbox
        self._user = user
        self._cwd = cwd
        self._env = env

    async def start(self) -> CreateBashSessionResponse:
        """Start the shell and read the files that the request names."""
        pty = await self._sandbox.pty(
            _SHELL,
            cols=500,
            cwd=self._cwd,
            env={**self._env, "TERM": "dumb", "PS1": self._ps1, "PS2": "", "PS0": ""},
            user=self._user,
        )
        shell = Shell(pty, self._sandbox, self._user)
        self._shell = shell
        try:
            return await blocking(self._prepare)
        except BaseException:
            await self.close()
            raise

    def _prepare(self) -> CreateBashSessionResponse:
        time.sleep(_SETTLE_S)
        commands = [f"source {path}" for path in self.request.startup_source]
        if commands:
            commands.append(f"sleep {_SETTLE_S}")
        commands += self._get_reset_commands()
        # The line's own text may come back, if it arrives before the echo is off: so the prompt
        # only counts after a mark that the line does not hold as it stands.
        self.shell.sendline(" ; ".join([*commands, 'echo "RE""ADY"']))
        timeout_s = max(self.request.startup_timeout, _START_S)
        self.shell.expect("READY", timeout=timeout_s)
        output = _strip_control_chars(self.shell.before)
        self.shell.expect(self._ps1, timeout=timeout_s)
        return CreateBashSessionResponse(output=output.replace(self._ps1, ""))

    async def _run_normal(self, action: BashAction) -> BashObservation:
        self._check_syntax(action.command)
        line, wanted = action.command, [*action.expect, self._ps1]
        try:
            line = " ; ".join(_split_bash_command(action.command))
        except Exception as exc:  # The parser fails in many ways on what bash takes.
            self.logger.debug("bashlex cannot split the command: %s", exc)
            line += (
                f"\nTMPEXITCODE=$? ; sleep 0.1; echo -n '{self._UNIQUE_STRING}' ; "
                "(exit $TMPEXITCODE)"
            )
            wanted = [self._UNIQUE_STRING]
        self.shell.sendline(line)
        try:
            matched = wanted[self.shell.expect(wanted, timeout=action.timeout)]
        except pexpect.TIMEOUT as exc:
            raise CommandTimeoutError(
                f"timeout after {action.timeout} seconds while running command {action.command!r}"
            ) from exc
        output = _strip_control_chars(self.shell.before)
        if action.check == "ignore":
            return BashObservation(output=output, exit_code=None, expect_string=matched)
        try:
            more, exit_code = self._exit_code()
        except Exception:
            if action.check == "raise":
                raise
            more, exit_code = "", None
        output = (output + more).replace(self._UNIQUE_STRING, "").replace(self._ps1, "")
        return BashObservation(output=output, exit_code=exit_code, expect_string=matched)

    def _exit_code(self) -> tuple[str, int]:
        """The last command's exit code, and what was written until it came."""
        self.shell.sendline("\necho EXITCODESTART$?EXITCODEEND")
        try:
            self.shell.expect("EXITCODEEND", timeout=_EXIT_CODE_S)
            text = _strip_control_chars(self.shell.before)
            self.shell.expect(self._ps1, timeout=_EXIT_CODE_S)
        except pexpect.TIMEOUT as exc:
            raise NoExitCodeError("timeout while getting exit code") from exc
        codes = _CODE.findall(text)
        if len(codes) != 1:
            raise NoExitCodeError(f"failed to parse exit code from output {text!r}")
        return text.split("EXITCODESTART")[0], int(codes[0])

    def _check_syntax(self, command: str) -> None:
        checked = self.shell._wait(
            self._sandbox.exec(
                ["bash", "-n"], stdin=command + "\n", user=self._user, timeout_s=_START_S
            )
        )
        if checked.ok:
            return
        raise BashIncorrectSyntaxError(
            f"Error (exit code {checked.exit_code}) while checking bash command \n{command!r}\n"
            f"---- Stderr ----\n{checked.stderr}\n---- Stdout ----\n{checked.stdout}",
            extra_info={"bash_stdout": checked.stdout, "bash_stderr": checked.stderr},
        )

    async def close(self) -> CloseBashSessionResponse:
        """End the shell and all that runs in it."""
        shell, self._shell = self._shell, None
        if shell is not None:
            await shell.aclose()
        return CloseBashSessionResponse()

    def interact(self) -> None:
        """Not offered."""
        raise NotImplementedError("Use `opendsec shell` to get into the sandbox.")


async def blocking(work: Callable[[], T]) -> T:
    """Run what blocks in a thread of its own: commands of many sandboxes wait side by side.

    The pool of ``asyncio.to_thread`` has a handful of threads, which long commands would fill.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            set_it(value)

    def run() -> None:
        finish: Callable[[Any], None] = done.set_result
        value: Any
        try:
            value = work()
        except BaseException as exc:
            finish, value = done.set_exception, exc
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits.
            loop.call_soon_threadsafe(settle, finish, value)

    threading.Thread(target=run, name="swerex-session", daemon=True).start()
    return await done
