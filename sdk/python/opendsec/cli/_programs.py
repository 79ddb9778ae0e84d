# SPDX-License-Identifier: Apache-2.0
"""``run``, ``exec`` and ``shell``: a program's input, output and exit code pass through."""

from __future__ import annotations

import argparse
import os
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from opendsec import Client, OpendsecError, Process, Sandbox
from opendsec._limits import OUTPUT_BYTES_MAX_DEFAULT
from opendsec._models import CommandResult
from opendsec._sync._concurrency import alongside
from opendsec._sync._process import feed_stdin, kill_quietly

from . import _exit
from ._output import note, print_json, waiting
from ._session import awake, client_of, creation_arguments

SCRIPT_DIR = "/tmp"  # noqa: S108 - in the sandbox, which has one user
INTERPRETERS = {".py": "python3", ".js": "node", ".mjs": "node", ".sh": "bash"}
STDIN_CHUNK_BYTES = 64 * 1024
AFTER_PROGRAM_S = 60
"""The sandbox of ``run`` outlives the program's limit by so much, so that the limit is what ends
the program, and is reported."""


def run(args: argparse.Namespace) -> int:
    """Create, run, print, remove."""
    if not (args.program or args.code is not None or args.file):
        raise _exit.Refused("nothing to run: give a program after --, or -c CODE, or -f FILE.")
    options = creation_arguments(args)
    options["timeout_s"] = args.timeout + AFTER_PROGRAM_S
    options["idempotency_key"] = args.idempotency_key or uuid.uuid4().hex
    with client_of(args) as client:
        sandbox = _create_or_undo(client, args, options)
        try:
            command = _command_of_run(sandbox, args)
            return _through(sandbox, command, args, timeout_s=args.timeout)
        finally:
            _remove(sandbox)


def exec_(args: argparse.Namespace) -> int:
    """Run in an existing sandbox."""
    if not args.program:
        raise _exit.Refused("nothing to run: opendsec exec ID -- PROGRAM [ARGUMENT...]")
    with client_of(args) as client:
        sandbox = awake(client, args.sandbox)
        if args.detach:
            return _detached(sandbox, args)
        return _through(sandbox, args.program, args, timeout_s=args.timeout, env=dict(args.env))


def shell(args: argparse.Namespace) -> int:
    """An interactive login shell."""
    from ._terminal import interactive

    with client_of(args) as client:
        sandbox = awake(client, args.sandbox)
        return interactive(sandbox, None, user=args.user, cwd=args.workdir)


def _through(
    sandbox: Sandbox,
    command: Sequence[str],
    args: argparse.Namespace,
    *,
    timeout_s: float | None,
    env: dict[str, str] | None = None,
) -> int:
    if args.tty:
        from ._terminal import interactive

        return interactive(
            sandbox, command, user=args.user, cwd=args.workdir, env=env, timeout_s=timeout_s
        )
    # `run` takes piped input as a matter of course. `exec` must be told: in a shell loop it would
    # eat the loop's own input.
    takes_stdin = args.interactive or (args.command_name == "run" and _is_piped())
    process = sandbox.spawn(
        command,
        user=args.user,
        cwd=args.workdir,
        env=env,
        timeout_s=timeout_s,
        stdin=takes_stdin,
        # Output that is passed on need not be kept.
        output_limit_bytes=OUTPUT_BYTES_MAX_DEFAULT if args.json else 0,
    )
    result = _pass_output(process, takes_stdin, quiet=args.json)
    if args.json:
        print_json(_result_document(result))
    return result.exit_code


def _pass_output(process: Process, takes_stdin: bool, *, quiet: bool) -> CommandResult:
    feed = (lambda: feed_stdin(process, _stdin_chunks())) if takes_stdin else None
    with process:
        try:
            with alongside(feed):
                for event in process:
                    if not quiet:
                        _write_all(2 if event.stream == "stderr" else 1, event.data)
                return process.wait()
        except OpendsecError:
            raise
        except BaseException:
            kill_quietly(process)
            raise


def _detached(sandbox: Sandbox, args: argparse.Namespace) -> int:
    process = sandbox.spawn(
        args.program,
        user=args.user,
        cwd=args.workdir,
        env=dict(args.env),
        timeout_s=args.timeout,
    )
    process.disconnect()
    if args.json:
        print_json({"pid": process.pid})
    else:
        print(process.pid)
    return _exit.OK


def _create_or_undo(client: Client, args: argparse.Namespace, options: dict[str, Any]) -> Sandbox:
    """Create; if interrupted meanwhile, find out what came of it and remove it."""
    try:
        with waiting("Creating the sandbox..."):
            return client.create(**options)
    except (KeyboardInterrupt, _exit.Terminated):
        note("Removing the sandbox...")
        # The same key finds the sandbox of the interrupted call, if there is one.
        with client_of(args, retries_max=1) as second:
            try:
                second.create(**options).kill()
            except OpendsecError:
                note(f"If it was made, it ends by itself within {options['timeout_s']:g} s.")
        raise


def _remove(sandbox: Sandbox) -> None:
    try:
        sandbox.kill()
    except OpendsecError as error:
        # The program's result stands; the sandbox ends at its time-out in any case.
        print(
            f"opendsec: sandbox {sandbox.sandbox_id} could not be removed now ({error.message}); "
            "it ends by itself at its time-out.",
            file=sys.stderr,
        )


def _command_of_run(sandbox: Sandbox, args: argparse.Namespace) -> list[str]:
    if args.code is not None:
        return ["python3", "-u", "-c", args.code, *args.program]
    if args.file is None:
        return list(args.program)
    local = Path(args.file)
    remote = f"{SCRIPT_DIR}/{local.name}"
    sandbox.files.write(remote, local.read_bytes(), user=args.user)
    interpreter = INTERPRETERS.get(local.suffix)
    if interpreter is None:
        sandbox.exec(["chmod", "+x", remote], user=args.user, check=True)
        return [remote, *args.program]
    unbuffered = ["-u"] if interpreter == "python3" else []
    return [interpreter, *unbuffered, remote, *args.program]


def _result_document(result: CommandResult) -> dict[str, Any]:
    return {
        "exit_code": result.exit_code,
        "signal": result.signal,
        "stdout": result.stdout,
        "stderr": result.stderr,
        "truncated": result.truncated,
    }


def _is_piped() -> bool:
    try:
        return not os.isatty(0)
    except OSError:
        return False  # Standard input is closed.


def _stdin_chunks() -> Iterator[bytes]:
    # Not sys.stdin: its lock would be held by a thread that waits for input when we exit.
    while chunk := os.read(0, STDIN_CHUNK_BYTES):
        yield chunk


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
