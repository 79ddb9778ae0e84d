# SPDX-License-Identifier: AGPL-3.0-only
"""Real Firecracker machines, where the programs and a working KVM are; a reason where not."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from opendsec_server.binaries import find_agent
from opendsec_server.config import Config, ConfigError
from opendsec_server.images.guest import GuestImage, ensure_guest
from opendsec_server.node.vmm.firecracker import FirecrackerVmm
from opendsec_server.ops.kvm_probe import probe_kvm

from .vms import Machine, sh

REPOSITORY = Path(__file__).parents[6]
POOL_MB = 4_096
FIRST_BUILD_TIMEOUT_S = 900
LAYER_PROGRAMS = ("sh", "cat", "sleep", "echo", "mkdir", "ip", "dd", "md5sum", "sync", "mv")

MakeMachine = Callable[[], Machine]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Guests are slow on an emulated host, and the first test makes the guest image."""
    for item in items:
        if "make_machine" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(FIRST_BUILD_TIMEOUT_S))


@pytest.fixture(scope="session")
def usable(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips, with the reason, unless Firecracker can run here."""
    if os.geteuid() != 0:
        pytest.skip("Firecracker's jailer needs root")
    answer = probe_kvm(tmp_path_factory.mktemp("probe"))
    if not answer.usable:
        pytest.skip(f"KVM: {answer.detail}")


@pytest.fixture
async def driver(usable: None) -> FirecrackerVmm:
    """A driver that has found its programs."""
    made = FirecrackerVmm(Config())
    try:
        await made.probe()
    except ConfigError as exc:
        pytest.skip(str(exc))
    return made


@pytest.fixture(scope="session")
def pool() -> Iterator[Path]:
    """A file system with reflinks, as a node's disk pool is."""
    scratch = Path(tempfile.mkdtemp(prefix="opendsec-fc-", dir="/var/tmp"))
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


def _agent() -> Path:
    built = sorted(
        REPOSITORY.glob("dataplane/target/*/release/opendsec-agent"),
        key=lambda path: path.stat().st_mtime,
    )
    if "OPENDSEC_AGENT" not in os.environ and built:
        return built[-1]
    try:
        return find_agent(Config())
    except ConfigError as exc:
        pytest.skip(str(exc))


@pytest.fixture
async def guest(usable: None, tmp_path_factory: pytest.TempPathFactory) -> GuestImage:
    """The guest image, made once per machine."""
    os.environ.setdefault("OPENDSEC_IMAGE_CACHE", "/var/tmp/opendsec-test-images")
    images = Path("/var/tmp/opendsec-fc-guest")
    images.mkdir(mode=0o711, exist_ok=True)
    return await ensure_guest(Config(), images, _agent(), print)


@pytest.fixture(scope="session")
def layer(pool: Path) -> Path:
    """A small read-only layer: busybox."""
    busybox = shutil.which("busybox")
    if busybox is None or shutil.which("mkfs.erofs") is None:
        pytest.skip("needs busybox-static and erofs-utils")
    root = pool / "layer"
    for name in ("bin", "etc", "proc", "sys", "dev", "run", "tmp", "root", "home/user", "usr/bin"):
        (root / name).mkdir(parents=True, exist_ok=True)
    shutil.copy(busybox, root / "bin/busybox")
    for name in LAYER_PROGRAMS:
        (root / "bin" / name).symlink_to("busybox")
    (root / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"
    )
    (root / "etc/group").write_text("root:x:0:\nuser:x:1000:\n")
    image = pool / "layer.erofs"
    subprocess.run(["mkfs.erofs", "-zlz4", str(image), str(root)], check=True, capture_output=True)
    return image


@pytest.fixture
async def make_machine(
    driver: FirecrackerVmm, scratch: Path, guest: GuestImage, layer: Path
) -> AsyncIterator[MakeMachine]:
    """Makes machines that are not started yet; ends them and looks for what they left."""
    made: list[Machine] = []

    def make() -> Machine:
        machine = Machine(driver, scratch, guest, layer)
        made.append(machine)
        return machine

    yield make
    for machine in made:
        await machine.stop()
