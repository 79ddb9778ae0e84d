# SPDX-License-Identifier: AGPL-3.0-only
"""Parts of the driver without QEMU."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from opendsec_server.contract.errors import SnapshotDamaged, SnapshotIncompatible
from opendsec_server.node.vmm import manifest
from opendsec_server.node.vmm.base import DEVICES_FILE, MANIFEST_FILE, RAM_FILE, SUMS_FILE
from opendsec_server.node.vmm.console import BoundedLog
from opendsec_server.node.vmm.launch import FIRST_FD, Descriptors
from opendsec_server.node.vmm.manifest import Manifest
from opendsec_server.node.vmm.qemu import qmp
from opendsec_server.node.vmm.qemu.qmp import Qmp, QmpError, listen

GREETING = b'{"QMP": {}}\n'
Server = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Serve = Callable[[Server], Awaitable[Path]]


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    """Serves one behaviour on a socket with a path longer than a socket address."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    servers: list[asyncio.Server] = []

    async def start(behaviour: Server) -> Path:
        path = folder / "qmp.sock"
        path.unlink(missing_ok=True)

        async def safely(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await behaviour(reader, writer)
            except ConnectionError:
                return
            finally:
                writer.close()

        servers.append(await asyncio.start_unix_server(safely, sock=listen(path)))
        return path

    yield start
    for server in servers:
        server.close()


def says(*answers: bytes) -> Server:
    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        for answer in answers:
            await reader.readline()
            writer.write(answer)
            await writer.drain()
        await reader.read()

    return behave


OK = b'{"return": {}}\n'


async def test_answers_among_events(serve: Serve) -> None:
    path = await serve(says(OK, b'{"event": "STOP"}\n{"return": {"status": "paused"}}\n'))
    assert path.stat().st_mode & 0o777 == 0o600
    async with Qmp(path, 5.0) as control:
        assert await control.execute("query-status") == {"status": "paused"}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b'{"error": {"class": "x", "desc": "not now"}}\n', "not now"),
        (b"nonsense\n", "makes no sense"),
        (b"\xff\xfe\n", "makes no sense"),
        (b"[1]\n", "makes no sense"),
        (b'{"event": "E"}\n' * 2_000, "talks without answering"),
        (b"x" * (qmp.ANSWER_BYTES_MAX + 100_000), "too long"),
    ],
)
async def test_bad_answers(serve: Serve, answer: bytes, said: str) -> None:
    path = await serve(says(OK, answer))
    async with Qmp(path, 5.0) as control:
        with pytest.raises(QmpError, match=said):
            await control.execute("stop")


async def test_silence_and_ends(serve: Serve, tmp_path: Path) -> None:
    path = await serve(says(OK, b""))
    async with Qmp(path, 0.2) as control:
        with pytest.raises(QmpError, match="did not answer"):
            await control.execute("stop")

    async def leaves(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def mute(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    for behaviour in (leaves, mute):
        path = await serve(behaviour)
        with pytest.raises(QmpError):
            async with Qmp(path, 0.2):
                raise AssertionError("connected")
    with pytest.raises(QmpError, match="does not answer"):
        async with Qmp(tmp_path / "missing.sock", 0.2):
            raise AssertionError("connected")


def test_log_is_bounded_and_newest_last() -> None:
    log = BoundedLog.create("opendsec-test", 4_096)
    try:
        assert log.tail() == ""
        os.write(log.writer, b"first\n")
        assert log.tail() == "first\n"
        assert os.write(log.writer, b"x" * 5_000) < 4_096
        with pytest.raises(PermissionError):
            os.write(log.writer, b"x")
        with pytest.raises(PermissionError):
            os.ftruncate(log.writer, 10_000)
        for number in range(5_000):
            try:
                os.write(log.writer, b"%06d\n" % number)
            except PermissionError:
                # Full: looking makes room.
                log.tail()
            if number % 300 == 0:
                log.tail()
        log.tail()
        os.write(log.writer, b"999998\n999999\n")
        lines = log.tail(70).split()
        assert lines[-2:] == ["999998", "999999"]
        assert lines[1:] == sorted(lines[1:])
        assert len(log.tail(100)) == 100
    finally:
        log.close()


def test_log_is_found_in_a_process() -> None:
    log = BoundedLog.create("opendsec-test", 4_096)
    try:
        os.write(log.writer, b"hello")
        other = BoundedLog.of_process(os.getpid(), "opendsec-test")
        assert other is not None
        assert other.tail() == "hello"
        other.close()
        assert BoundedLog.of_process(os.getpid(), "opendsec-none") is None
    finally:
        log.close()


def test_descriptors_are_numbered_in_order(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with Descriptors() as given:
        numbers = [given.open(tmp_path / "file", os.O_RDONLY), given.reserve(), given.add(0)]
        assert numbers == [FIRST_FD, FIRST_FD + 1, FIRST_FD + 2]
        actions = given.actions()
        assert [target for _, _, target in actions] == [FIRST_FD, FIRST_FD + 2]
        sources = [source for _, source, _ in actions]
    for fd in sources:
        with pytest.raises(OSError):
            os.fstat(fd)


def _memory(folder: Path) -> Manifest:
    (folder / RAM_FILE).write_bytes(bytes(4_096))
    (folder / DEVICES_FILE).write_bytes(b"devices")
    (folder / SUMS_FILE).write_bytes(b"sums")
    draft = Manifest(
        vmm="qemu",
        vmm_version="7.2",
        accelerator="tcg",
        cpu_model="max",
        machine="microvm",
        vcpus=1,
        memory_mb=1,
        kernel="k",
        agent="a",
        ram_bytes=4_096,
    )
    manifest.write_draft(folder, draft)
    return manifest.seal(folder, durable=True)


def test_every_changed_byte_of_a_manifest_is_found(tmp_path: Path) -> None:
    written = _memory(tmp_path)
    assert manifest.read_manifest(tmp_path) == written
    manifest.require_whole(tmp_path, written)
    manifest.require_sums_whole(tmp_path, written)
    path = tmp_path / MANIFEST_FILE
    good = path.read_bytes()
    missed = []
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x01]) + good[at + 1 :])
        try:
            same = manifest.read_manifest(tmp_path) == written
        except (SnapshotDamaged, SnapshotIncompatible):
            continue
        if not same:
            missed.append(at)
    assert missed == []
    for at in range(len(good)):
        path.write_bytes(good[:at])
        with pytest.raises(SnapshotDamaged):
            manifest.read_manifest(tmp_path)


def test_an_unsealed_directory_is_damaged_and_a_newer_format_incompatible(tmp_path: Path) -> None:
    written = _memory(tmp_path)
    newer = msgspec.structs.replace(written, format=manifest.FORMAT + 1)
    (tmp_path / MANIFEST_FILE).write_bytes(msgspec.json.encode(newer))
    with pytest.raises(SnapshotIncompatible):
        manifest.read_manifest(tmp_path)
    (tmp_path / MANIFEST_FILE).unlink()
    with pytest.raises(SnapshotDamaged, match="no manifest"):
        manifest.read_manifest(tmp_path)
    (tmp_path / DEVICES_FILE).write_bytes(b"Devices")
    with pytest.raises(SnapshotDamaged):
        manifest.require_whole(tmp_path, written)
    (tmp_path / SUMS_FILE).unlink()
    with pytest.raises(SnapshotDamaged):
        manifest.require_sums_whole(tmp_path, written)
