# SPDX-License-Identifier: AGPL-3.0-only
"""Real QEMU machines; a reason where they cannot run."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from opendsec_server.binaries import find_agent, find_ram
from opendsec_server.config import Config, ConfigError
from opendsec_server.images.guest import GuestImage, ensure_guest
from opendsec_server.images.guest.cpio import Archive
from opendsec_server.node.vmm.firecracker.tests.vms import sh
from opendsec_server.node.vmm.qemu import QemuVmm
from opendsec_server.node.vmm.qemu.program import find_qemu

from .guests import TestMachine

POOL_MB = 3_072
SLOW_TIMEOUT_S = 900
IMAGES = Path("/var/tmp/opendsec-test-vmm-guest")

MakeMachine = Callable[[], TestMachine]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Guests are emulated, and the first test makes the guest image."""
    for item in items:
        if "make_machine" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))


def _apart(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine where no event loop is in the way."""
    found: list[Any] = []

    def body() -> None:
        try:
            found.append(asyncio.run(work))
        except BaseException as exc:
            found.append(exc)

    thread = Thread(target=body)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


@pytest.fixture(scope="session")
def usable() -> None:
    """Skips, with the reason, unless QEMU can run here."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    try:
        find_qemu(None)
        find_ram()
    except ConfigError as exc:
        pytest.skip(str(exc))
    if shutil.which("gcc") is None:
        pytest.skip("the test guest's init needs gcc and libc6-dev")


@pytest.fixture(scope="session")
def vmm(usable: None) -> QemuVmm:
    """A driver that has found its programs."""
    made = QemuVmm(Config(), "tcg")
    _apart(made.probe())
    return made


@pytest.fixture(scope="session")
def pool(usable: None) -> Iterator[Path]:
    """A file system with reflinks, as a node's disk pool is."""
    scratch = Path(tempfile.mkdtemp(prefix="opendsec-qemu-", dir="/var/tmp"))
    image, point = scratch / "image", scratch / "pool"
    with image.open("wb") as out:
        out.truncate(POOL_MB << 20)
    point.mkdir()
    sh("mkfs.btrfs", "-q", str(image))
    sh("mount", "-o", "loop", str(image), str(point))
    yield point
    sh("umount", str(point))
    shutil.rmtree(scratch)


@pytest.fixture
def scratch(pool: Path) -> Iterator[Path]:
    """A directory in the pool."""
    path = Path(tempfile.mkdtemp(dir=pool))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def guest(usable: None) -> GuestImage:
    """The packaged kernel, fetched once per machine."""
    os.environ.setdefault("OPENDSEC_IMAGE_CACHE", "/var/tmp/opendsec-test-images")
    IMAGES.mkdir(mode=0o711, exist_ok=True)
    try:
        agent = find_agent(Config())
    except ConfigError as exc:
        pytest.skip(str(exc))
    made: GuestImage = _apart(ensure_guest(Config(), IMAGES, agent, print))
    return made


@pytest.fixture(scope="session")
def initramfs(guest: GuestImage, pool: Path) -> Path:
    """The guest's own initramfs with another init laid over it."""
    program = pool / "init"
    source = Path(__file__).parent / "init.c"
    subprocess.run(["gcc", "-static", "-O1", "-o", str(program), str(source)], check=True)
    archive = Archive()
    archive.file("init", program.read_bytes(), 0o755)
    path = pool / "initramfs"
    path.write_bytes(guest.initramfs.read_bytes() + archive.to_bytes())
    path.chmod(0o644)
    return path


@pytest.fixture
async def make_machine(
    vmm: QemuVmm, scratch: Path, guest: GuestImage, initramfs: Path
) -> AsyncIterator[MakeMachine]:
    """Makes machines that are not started yet; ends them."""
    made: list[TestMachine] = []

    def make() -> TestMachine:
        machine = TestMachine(scratch, guest, initramfs)
        made.append(machine)
        return machine

    yield make
    for machine in made:
        machine.close(vmm)


@dataclass(frozen=True)
class Saved:
    """A machine saved once for all tests.

    Attributes:
        memory: Its memory.
        disk: Its disk at that time.
        count: The last number it had said.
    """

    memory: Path
    disk: Path
    count: int


@pytest.fixture(scope="session")
def saved(vmm: QemuVmm, pool: Path, guest: GuestImage, initramfs: Path) -> Saved:
    """Booted, saved while it counts, killed."""

    async def make() -> Saved:
        machine = TestMachine(pool, guest, initramfs)
        try:
            await machine.boot(vmm)
            await machine.until_count(vmm, 5)
            memory = pool / "saved"
            memory.mkdir()
            await vmm.freeze(machine.run_dir)
            await vmm.save(machine.run_dir, machine.pid, memory, None)
            count = machine.counts(vmm)[-1]
            disk = pool / "saved.disk"
            sh("cp", "--reflink=auto", "--sparse=always", str(machine.disk), str(disk))
            machine.kill()
            await vmm.seal(memory, durable=True)
        finally:
            machine.close(vmm)
        return Saved(memory, disk, count)

    made: Saved = _apart(make())
    return made
