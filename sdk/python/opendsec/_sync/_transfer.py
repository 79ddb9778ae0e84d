# SPDX-License-Identifier: Apache-2.0
# Generated from _async/_transfer.py by scripts/generate_sync.py. Do not edit.
# ruff: noqa: RUF100, SIM117, UP028
"""Files and whole directories between this machine and a sandbox."""

from __future__ import annotations

import posixpath
from pathlib import Path
from typing import TYPE_CHECKING

from opendsec import _archive
from opendsec._errors import DiskFull, FileNotFound, InvalidRequest, NotSupported, UserError
from opendsec._models import CommandResult

from ._concurrency import alongside, in_thread
from ._connect import SandboxWire
from ._process import feed_stdin, kill_quietly, start_process

if TYPE_CHECKING:
    from ._files import Files

EXECUTABLE = 0o111
_NOT_FOUND_EXIT_CODE = 127


def upload(wire: SandboxWire, files: Files, local: Path, remote: str, user: str | None) -> None:
    """See ``Files.upload``."""
    target = _remote_target(files, local, remote, user)
    if not in_thread(local.is_dir):
        with local.open("rb") as content:
            entry = files.write(target, content, user=user)
        mode = in_thread(lambda: local.stat().st_mode & 0o777)
        if mode & EXECUTABLE:
            chmod = ["chmod", f"{mode:o}", entry.path]
            process = start_process(wire, chmod, user=user)
            with process:
                process.wait(check=True)
        return
    parent, name = posixpath.split(target.rstrip("/"))
    files.make_dir(parent or ".", exist_ok=True, user=user)
    archive = in_thread(lambda: _archive.pack(local, name))
    with archive:
        process = start_process(
            wire,
            ["tar", "-xpof", "-"],
            cwd=(files.stat(parent or ".", user=user)).path,
            user=user,
            stdin=True,
        )
        with process, alongside(lambda: feed_stdin(process, archive)):
            result = process.wait()
    _check_tar(result, target)


def download(wire: SandboxWire, files: Files, remote: str, local: Path, user: str | None) -> None:
    """See ``Files.download``."""
    info = files.stat(remote, user=user)
    target = local / info.name if in_thread(local.is_dir) else local
    if not info.is_dir:
        content = files.stream(info.path, user=user)
        with content:
            with target.open("wb") as out:
                for chunk in content:
                    out.write(chunk)
        if info.mode & EXECUTABLE:
            in_thread(lambda: target.chmod(info.mode & 0o777))
        return
    _download_dir(wire, info.path, target, user)


def _download_dir(wire: SandboxWire, path: str, target: Path, user: str | None) -> None:
    parent, name = posixpath.split(path.rstrip("/"))
    if not name:
        raise InvalidRequest("The root directory cannot be copied as a whole.")
    process = start_process(
        wire,
        ["tar", "-cf", "-", "--", name],
        cwd=parent or "/",
        user=user,
        # The archive goes to the spool; what the process object keeps is only for errors.
        output_limit_bytes=64 * 1024,
    )
    with process:
        with _archive.spool() as archive:
            try:
                for event in process:
                    if event.stream == "stdout":
                        archive.write(event.data)
            except BaseException:
                kill_quietly(process)
                raise
            result = process.result
            assert result is not None
            _check_tar(result, path)
            in_thread(lambda: _archive.unpack(archive, target.parent, target.name))


def _remote_target(files: Files, local: Path, remote: str, user: str | None) -> str:
    """The path the copy will have, by the rules of ``cp``."""
    if not in_thread(local.exists):
        raise FileNotFoundError(f"There is no {local} on this machine.")
    name = (in_thread(local.resolve)).name
    if remote.endswith("/"):
        return posixpath.join(remote, name)
    try:
        info = files.stat(remote or ".", user=user)
    except FileNotFound:
        return remote
    return posixpath.join(info.path, name) if info.is_dir else info.path


def _check_tar(result: CommandResult, path: str) -> None:
    """Raise if ``tar`` failed."""
    if result.ok:
        return
    words = result.stderr.strip() or f"tar ended with exit code {result.exit_code}"
    if result.exit_code == _NOT_FOUND_EXIT_CODE:
        raise NotSupported(
            "The sandbox has no tar, which copying a directory needs.",
            remediation="Use a template with tar, or copy file by file.",
        )
    if "No space left on device" in words or "Disk quota exceeded" in words:
        raise DiskFull(f"The sandbox's disk is full: {words}")
    raise UserError(f"{path} could not be copied: {words}")
