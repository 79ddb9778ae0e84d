# SPDX-License-Identifier: AGPL-3.0-only
"""Parts of the driver that need neither Firecracker nor KVM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from opendsec_server.config import Config, ConfigError
from opendsec_server.contract.errors import SandboxStartFailed
from opendsec_server.node.vmm.base import VmConfig, VmDisk
from opendsec_server.node.vmm.firecracker import api, files, jail, machine, program, saved
from opendsec_server.node.vmm.firecracker.console import KEPT_BYTES, Consoles

OLD, NEW = program.features_of((1, 13, 0)), program.features_of((1, 16, 1))


# --- programs ----------------------------------------------------------------


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts scripts that answer ``--version`` in the place of the programs."""
    monkeypatch.delenv(program.SECCOMP_ENV, raising=False)

    def put(name: str, script: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv(f"OPENDSEC_{name.upper()}", str(path))

    return put


async def test_programs_of_one_release_are_found(fake: Callable[[str, str], None]) -> None:
    fake("firecracker", "echo 'Firecracker v1.16.1'; echo; echo exiting")
    fake("jailer", "echo 'Jailer v1.16.1'")
    found = await program.find_programs(Config())
    assert found.version == "1.16.1"
    assert found.features == NEW
    assert found.seccomp_filter is None


@pytest.mark.parametrize(
    ("firecracker", "jailer", "said"),
    [
        ("echo 'Firecracker v1.12.9'", "echo 'Jailer v1.12.9'", "1.13 or newer"),
        ("echo 'Firecracker v1.16.1'", "echo 'Jailer v1.15.0'", "same release"),
        ("echo nonsense", "echo 'Jailer v1.15.0'", "--version failed"),
        ("echo 'Firecracker v1.16.1'; exit 3", "echo 'Jailer v1.16.1'", "failed \\(3\\)"),
    ],
)
async def test_programs_that_do_not_fit_are_named(
    fake: Callable[[str, str], None], firecracker: str, jailer: str, said: str
) -> None:
    fake("firecracker", firecracker)
    fake("jailer", jailer)
    with pytest.raises(ConfigError, match=said):
        await program.find_programs(Config())


async def test_missing_programs_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(program, "INSTALL_FOLDERS", (tmp_path,))
    monkeypatch.delenv(program.FIRECRACKER_ENV, raising=False)
    with pytest.raises(ConfigError, match="set OPENDSEC_FIRECRACKER"):
        await program.find_programs(Config())
    with pytest.raises(ConfigError, match="the setting names"):
        await program.find_programs(Config(firecracker_path=str(tmp_path / "none")))


async def test_a_dynamic_program_is_refused(
    fake: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("jailer", "echo 'Jailer v1.16.1'")
    dynamic = shutil.which("ls")
    assert dynamic is not None and program.is_dynamic(Path(dynamic))
    monkeypatch.setenv(program.FIRECRACKER_ENV, dynamic)
    with pytest.raises(ConfigError, match="dynamically"):
        await program.find_programs(Config())


def test_versions_differ_in_what_they_can() -> None:
    assert not (OLD.pmem or OLD.free_page_reporting or OLD.serial_rate_limit)
    assert not OLD.diff_of_any_size
    assert NEW.pmem and NEW.free_page_reporting and NEW.serial_rate_limit and NEW.diff_of_any_size


# --- the machine ---------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> VmConfig:
    return VmConfig(
        sandbox_id="some_box",
        vcpus=2,
        memory_mb=256,
        kernel=tmp_path / "vmlinuz",
        kernel_elf=tmp_path / "vmlinux",
        initramfs=tmp_path / "initramfs",
        cmdline="console=ttyS0 opendsec.vm=1",
        disks=(
            VmDisk(serial="layer0", path=tmp_path / "layer"),
            VmDisk(serial="modules", path=tmp_path / "modules"),
            VmDisk(serial="disk", path=tmp_path / "disk", read_only=False),
        ),
        tap="tap0",
        guest_mac="02:00:00:00:00:01",
        netns_fd=3,
        run_dir=tmp_path,
        cgroups=(),
        uid=1001,
        gid=1001,
    )


def test_requests_of_a_new_version(config: VmConfig) -> None:
    requests = machine.boot_requests(config, NEW, machine.RateLimits(), pmem=True)
    bodies = {target: body for _method, target, body in requests}
    assert bodies["/pmem/layer0"]["read_only"] and bodies["/pmem/modules"]["read_only"]
    assert bodies["/drives/disk"]["path_on_host"] == "/disks/disk"
    assert not bodies["/drives/disk"]["is_read_only"]
    assert "rate_limiter" not in bodies["/drives/disk"]
    assert bodies["/balloon"]["free_page_reporting"]
    assert "rate_limiter" in bodies["/serial"]
    assert "/mmds/config" not in bodies and "/vsock" not in bodies
    arguments = bodies["/boot-source"]["boot_args"]
    assert arguments.startswith(config.cmdline)
    assert "opendsec.disks=disk" in arguments and "opendsec.pmem=layer0,modules" in arguments
    assert requests[-1] == ("PUT", "/actions", {"action_type": "InstanceStart"})


def test_requests_of_an_old_version_with_limits(config: VmConfig) -> None:
    rates = machine.RateLimits(disk_bytes=1_000, disk_operations=10, network_bytes=2_000)
    requests = machine.boot_requests(config, OLD, rates, pmem=True)
    bodies = {target: body for _method, target, body in requests}
    assert "/serial" not in bodies and "/pmem/layer0" not in bodies
    assert bodies["/drives/layer0"]["is_read_only"]
    assert "rate_limiter" not in bodies["/drives/layer0"]
    assert bodies["/drives/disk"]["rate_limiter"]["ops"] == {"size": 10, "refill_time": 1_000}
    assert bodies["/network-interfaces/eth0"]["rx_rate_limiter"]["bandwidth"]["size"] == 2_000
    assert "free_page_reporting" not in bodies["/balloon"]
    assert "opendsec.disks=layer0,modules,disk" in bodies["/boot-source"]["boot_args"]


def test_machines_that_firecracker_has_not_are_refused(config: VmConfig) -> None:
    many = tuple(VmDisk(serial=f"d{i}", path=config.kernel) for i in range(14))
    for change in ({"vcpus": 33}, {"disks": many}):
        with pytest.raises(SandboxStartFailed):
            machine.boot_requests(
                msgspec.structs.replace(config, **change), NEW, machine.RateLimits(), pmem=True
            )


def test_ids_are_made_fit_for_the_jailer() -> None:
    assert jail.vm_id_of("box_1.x") == "box-1-x"
    assert len(jail.vm_id_of("a" * 100)) == 64


# --- the API ---------------------------------------------------------------------


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Path, list[bytes], list[bytes]]]:
    """A socket (with a long path), what it got, and the answers it gives, in order."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    got: list[bytes] = []
    answers: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            got.append(head + await reader.readexactly(length))
            if answers:
                writer.write(answers.pop(0))
                await writer.drain()
            else:
                await reader.read()  # until the caller gives up

    folder_fd = os.open(folder, os.O_PATH)
    server = await asyncio.start_unix_server(serve, f"/proc/self/fd/{folder_fd}/api.sock")
    os.close(folder_fd)
    yield folder / "api.sock", got, answers
    server.close()
    await asyncio.sleep(0.05)


async def test_calls_and_what_they_raise(
    served: tuple[Path, list[bytes], list[bytes]],
) -> None:
    path, got, answers = served
    assert await api.can_connect(path)
    answers += [
        b"HTTP/1.1 204 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\r\n",
        b'HTTP/1.1 400 \r\nContent-Length: 26\r\n\r\n{"fault_message":"no way"}',
        b"nonsense\r\n\r\n",
    ]
    assert await api.call(path, "PUT", "/entropy", {}) == b""
    assert got[-1].startswith(b"PUT /entropy HTTP/1.1\r\n") and got[-1].endswith(b"{}")
    with pytest.raises(api.ApiError, match="no way") as refused:
        await api.call(path, "PUT", "/balloon", {})
    assert refused.value.refused
    with pytest.raises(api.ApiError, match="broke off"):
        await api.call(path, "GET", "/")
    with pytest.raises(api.ApiError, match="did not answer") as silent:
        await api.call(path, "GET", "/", timeout_s=0.05)
    assert not silent.value.refused
    assert not await api.can_connect(path.with_name("none"))


# --- console, notes, files -------------------------------------------------------


async def test_a_console_keeps_the_end_and_never_blocks(tmp_path: Path) -> None:
    consoles = Consoles()
    writer = consoles.open(tmp_path)
    assert consoles.open(tmp_path) == writer
    os.write(writer, b"first\n")
    assert consoles.tail(tmp_path) == "first\n"
    with contextlib.suppress(BlockingIOError):
        for _ in range(100):  # more than a pipe holds, with nobody reading
            os.write(writer, b"x" * 65_536)
    for _ in range(100):
        await asyncio.sleep(0)  # the loop empties it
    os.write(writer, b"last\n")
    text = consoles.tail(tmp_path)
    assert text.endswith("last\n") and len(text) <= KEPT_BYTES
    consoles.close(tmp_path)
    consoles.close(tmp_path)
    assert consoles.tail(tmp_path) == ""


def test_a_base_is_known_again_or_not_used(tmp_path: Path) -> None:
    ram, bases = tmp_path / "ram", saved.Bases()
    ram.write_bytes(b"memory")
    mark = bases.keep(tmp_path, ram)
    assert bases.find(tmp_path, mark) is not None
    ram.unlink()
    assert bases.find(tmp_path, mark) is not None, "deleted, but still open"
    bases.forget(tmp_path)
    assert bases.find(tmp_path, mark) is None
    ram.write_bytes(b"memory")
    assert saved.Bases().find(tmp_path, mark) is None, "another file of the same name"


def test_zero_pages_become_holes(tmp_path: Path) -> None:
    path = tmp_path / "ram"
    data = os.urandom(65_536) + bytes(1 << 20) + os.urandom(65_536)
    path.write_bytes(data)
    os.utime(path, ns=(1, 2))
    try:
        assert files.dig_holes(path) == 1 << 20
    except OSError as exc:
        pytest.skip(f"the file system of {tmp_path} has no holes: {exc}")
    assert path.read_bytes() == data
    assert path.stat().st_mtime_ns == 2
    assert path.stat().st_blocks * 512 < len(data)


def test_own_bytes_are_those_that_no_other_file_shares(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("mkfs.btrfs") is None:
        pytest.skip("needs root and btrfs-progs")
    image, point = tmp_path / "image", tmp_path / "pool"
    with image.open("wb") as out:
        out.truncate(256 << 20)
    point.mkdir()
    subprocess.run(["mkfs.btrfs", "-q", str(image)], check=True)
    mounted = subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=False)
    if mounted.returncode != 0:
        pytest.skip("btrfs cannot be mounted here")
    try:
        first, second = point / "first", point / "second"
        first.write_bytes(os.urandom(1 << 20))
        assert files.own_bytes(first) == 1 << 20
        with first.open("rb") as file:
            assert saved.clone_file(file.fileno(), second)
        assert files.own_bytes(second) == 0
        with second.open("r+b") as file:
            file.write(os.urandom(65_536))
        assert files.own_bytes(second) == 65_536
        assert second.read_bytes()[65_536:] == first.read_bytes()[65_536:]
        with second.open("r+b") as file:
            file.seek(131_072)
            file.write(bytes(65_536))
        assert files.dig_holes(second) == 65_536
        assert files.own_bytes(second) == 65_536
        assert second.read_bytes()[131_072:196_608] == bytes(65_536)
    finally:
        subprocess.run(["umount", str(point)], check=True)


def test_a_file_system_without_reflinks_is_told(tmp_path: Path) -> None:
    source = Path("/dev/shm") / f"opendsec-{os.getpid()}"
    source.write_bytes(b"x")
    try:
        with source.open("rb") as file:
            target = source.with_suffix(".copy")
            assert not saved.clone_file(file.fileno(), target)
            assert not target.exists()
    finally:
        source.unlink()
