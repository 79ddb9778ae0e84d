# SPDX-License-Identifier: Apache-2.0
"""Files and whole directories between this machine and a sandbox."""

from __future__ import annotations

import posixpath
from pathlib import Path
from typing import TYPE_CHECKING

from opendsec import _archive
from opendsec._errors import DiskFull, FileNotFound, InvalidRequest, NotSupported, UserError
from opendsec._models import CommandResult

from ._concurrency import alongside, in_thread
from ._connect import AsyncSandboxWire
from ._process import feed_stdin, kill_quietly, start_process

if TYPE_CHECKING:
    from ._files import AsyncFiles

EXECUTABLE = 0o111
_NOT_FOUND_EXIT_CODE = 127


async def upload(
    wire: AsyncSandboxWire, files: AsyncFiles, local: Path, remote: str, user: str | None
) -> None:
    """See ``AsyncFiles.upload``."""
    target = await _remote_target(files, local, remote, user)
    if not await in_thread(local.is_dir):
        with local.open("rb") as content:
            entry = await files.write(target, content, user=user)
        mode = await in_thread(lambda: local.stat().st_mode & 0o777)
        if mode & EXECUTABLE:
            chmod = ["chmod", f"{mode:o}", entry.path]
            process = await start_process(wire, chmod, user=user)
            async with process:
                await process.wait(check=True)
        return
    parent, name = posixpath.split(target.rstrip("/"))
    await files.make_dir(parent or ".", exist_ok=True, user=user)
    archive = await in_thread(lambda: _archive.pack(local, name))
    with archive:
        process = await start_process(
            wire,
            ["tar", "-xpof", "-"],
            cwd=(await files.stat(parent or ".", user=user)).path,
            user=user,
            stdin=True,
        )
        async with process, alongside(lambda: feed_stdin(process, archive)):
            result = await process.wait()
    _check_tar(result, target)


async def download(
    wire: AsyncSandboxWire, files: AsyncFiles, remote: str, local: Path, user: str | None
) -> None:
    """See ``AsyncFiles.download``."""
    info = await files.stat(remote, user=user)
    target = local / info.name if await in_thread(local.is_dir) else local
    if not info.is_dir:
        content = await files.stream(info.path, user=user)
        async with content:
            with target.open("wb") as out:
                async for chunk in content:
                    out.write(chunk)
        if info.mode & EXECUTABLE:
            await in_thread(lambda: target.chmod(info.mode & 0o777))
        return
    await _download_dir(wire, info.path, target, user)


async def _download_dir(wire: AsyncSandboxWire, path: str, target: Path, user: str | None) -> None:
    parent, name = posixpath.split(path.rstrip("/"))
    if not name:
        raise InvalidRequest("The root directory cannot be copied as a whole.")
    process = await start_process(
        wire,
        ["tar", "-cf", "-", "--", name],
        cwd=parent or "/",
        user=user,
        # The archive goes to the spool; what the process object keeps is only for errors.
        output_limit_bytes=64 * 1024,
    )
    async with process:
        with _archive.spool() as archive:
            try:
                async for event in process:
                    if event.stream == "stdout":
                        archive.write(event.data)
            except BaseException:
                await kill_quietly(process)
                raise
            result = process.result
            assert result is not None
            _check_tar(result, path)
            await in_thread(lambda: _archive.unpack(archive, target.parent, target.name))


async def _remote_target(files: AsyncFiles, local: Path, remote: str, user: str | None) -> str:
    """The path the copy will have, by the rules of ``cp``."""
    if not await in_thread(local.exists):
        raise FileNotFoundError(f"There is no {local} on this machine.")
    name = (await in_thread(local.resolve)).name
    if remote.endswith("/"):
        return posixpath.join(remote, name)
    try:
        info = await files.stat(remote or ".", user=user)
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
