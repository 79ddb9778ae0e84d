# SPDX-License-Identifier: AGPL-3.0-only
"""Kernel images, modules and archives of a guest, without booting one."""

from __future__ import annotations

import asyncio
import gzip
import lzma
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest

from opendsec_server.config import Config, ConfigError
from opendsec_server.images.apt_sources import Distribution, UnsupportedHost
from opendsec_server.images.guest import (
    GuestBuildError,
    ensure_guest,
    guest_cmdline,
    package,
)
from opendsec_server.images.guest.cpio import Archive
from opendsec_server.images.guest.modules import boot_modules, load_order, pack_modules
from opendsec_server.images.guest.tools import run
from opendsec_server.images.guest.vmlinux import extract_vmlinux, kernel_release

ELF = b"\x7fELF" + bytes(range(256)) * 64
RELEASE = "6.1.0-1-cloud-amd64"


def vmlinuz(payload: bytes, release: str = RELEASE) -> bytes:
    """A kernel image as far as its boot header goes."""
    sectors = 2
    head = bytearray((sectors + 1) * 512)
    head[0x1F1] = sectors
    head[0x202:0x206] = b"HdrS"
    text_at = 0x300
    struct.pack_into("<HH", head, 0x206, 0x20F, 0)
    struct.pack_into("<H", head, 0x20E, text_at - 0x200)
    struct.pack_into("<II", head, 0x248, 64, len(payload))
    text = f"{release} (builder@host) #1 SMP\0".encode()
    head[text_at : text_at + len(text)] = text
    return bytes(head) + bytes(64) + payload + b"signature"


def sized(packed: bytes) -> bytes:
    return packed + struct.pack("<I", len(ELF))


def tool(*argv: str) -> bytes:
    if shutil.which(argv[0]) is None:
        pytest.skip(f"{argv[0]} is not installed")
    return sized(run("packing", argv, timeout_s=20, stdin=ELF))


@pytest.mark.parametrize("kind", ["gzip", "xz", "lzma", "lz4", "zstd"])
def test_vmlinux_comes_out(kind: str) -> None:
    packed = {
        "gzip": lambda: gzip.compress(ELF),
        "xz": lambda: sized(lzma.compress(ELF, check=lzma.CHECK_CRC32)),
        "lzma": lambda: sized(lzma.compress(ELF, format=lzma.FORMAT_ALONE)),
        "lz4": lambda: tool("lz4", "-l", "-c", "-q"),
        "zstd": lambda: tool("zstd", "-c", "-q"),
    }[kind]()
    image = vmlinuz(packed)
    assert extract_vmlinux(image) == ELF
    assert kernel_release(image) == RELEASE


@pytest.mark.parametrize(
    ("image", "text"),
    [
        (b"", "no boot header"),
        (bytes(4096), "no boot header"),
        (vmlinuz(gzip.compress(ELF))[:1700], "cut short"),
        (vmlinuz(b"\0\1\2\3" * 20), "unknown way"),
        (vmlinuz(gzip.compress(ELF)[:-30]), "damaged"),
        (vmlinuz(gzip.compress(b"text")), "no ELF"),
        (vmlinuz(sized(b"\xfd7zXZ\0" + bytes(40))), "damaged"),
    ],
)
def test_damaged_images(image: bytes, text: str) -> None:
    with pytest.raises(GuestBuildError, match=text):
        extract_vmlinux(image)


def test_archive_is_what_cpio_reads(tmp_path: Path) -> None:
    archive = Archive()
    archive.file("init", b"agent", 0o755)
    archive.file("modules/00-a.ko", b"abc")
    archive.directory("modules")
    archive.character_device("dev-console", 5, 1)
    raw = archive.to_bytes()
    again = Archive()
    again.directory("modules")
    again.character_device("dev-console", 5, 1)
    again.file("modules/00-a.ko", b"abc")
    again.file("init", b"agent", 0o755)
    assert raw == again.to_bytes()
    assert len(raw) % 512 == 0
    if shutil.which("cpio") is None:
        names = [name for name in (b"init", b"modules/00-a.ko", b"TRAILER!!!") if name in raw]
        assert len(names) == 3
        return
    listing = subprocess.run(
        ["cpio", "-tv"], input=raw, capture_output=True, check=True, timeout=20
    ).stdout.decode()
    assert "-rwxr-xr-x" in listing
    assert "modules/00-a.ko" in listing
    assert "5,   1" in listing


def kernel_tree(root: Path, release: str = RELEASE, *, without: str = "") -> Path:
    """An unpacked kernel package; depmod's tables are made by hand."""
    modules = root / "lib/modules" / release
    files = {
        "drivers/virtio/virtio_ring.ko": "",
        "drivers/virtio/virtio.ko": "",
        "drivers/virtio/virtio_mmio.ko": "virtio virtio_ring",
        "drivers/block/virtio_blk.ko.xz": "virtio virtio_ring",
        "drivers/net/virtio_net.ko.gz": "virtio virtio_ring",
        "drivers/net/ethernet/card.ko": "",
        "drivers/char/hw_random/virtio-rng.ko": "virtio virtio_ring",
        "fs/erofs/erofs.ko": "libcrc32c",
        "lib/libcrc32c.ko": "",
        "fs/overlayfs/overlay.ko": "",
        "net/bridge/bridge.ko": "",
        "sound/card.ko": "",
    }
    paths = {}
    for name in files:
        path = modules / "kernel" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = b"\x7fELF" + name.encode()
        if name.endswith(".xz"):
            data = lzma.compress(data)
        elif name.endswith(".gz"):
            data = gzip.compress(data)
        path.write_bytes(data)
        paths[path.name.split(".")[0]] = f"kernel/{name}"
    lines = [
        f"kernel/{name}: {' '.join(paths[need] for need in needs.split())}\n"
        for name, needs in files.items()
        if not without or without not in name
    ]
    (modules / "modules.dep").write_text("".join(lines))
    (modules / "modules.builtin").write_text(
        "kernel/fs/ext4/ext4.ko\nkernel/net/packet/af_packet.ko\n"
    )
    (modules / "modules.order").write_text("")
    (root / "boot").mkdir(exist_ok=True)
    (root / f"boot/vmlinuz-{release}").write_bytes(vmlinuz(gzip.compress(ELF), release))
    return modules


def test_modules_come_after_what_they_need(tmp_path: Path) -> None:
    modules = kernel_tree(tmp_path)
    names = [path.name.split(".")[0] for path in load_order(modules)]
    assert names == [
        "virtio_ring", "virtio", "virtio_mmio", "virtio_blk", "virtio_net", "libcrc32c", "erofs",
        "overlay", "virtio-rng",
    ]  # fmt: skip
    found = boot_modules(modules)
    assert next(iter(found)) == "00-virtio_ring.ko"
    assert found["03-virtio_blk.ko"] == b"\x7fELFdrivers/block/virtio_blk.ko.xz"
    assert found["04-virtio_net.ko"] == b"\x7fELFdrivers/net/virtio_net.ko.gz"
    assert "08-virtio_rng.ko" in found
    (modules / "kernel/fs/overlayfs/overlay.ko").write_bytes(b"no module")
    with pytest.raises(GuestBuildError, match=r"overlay\.ko is damaged"):
        boot_modules(modules)


def test_kernel_without_a_needed_module(tmp_path: Path) -> None:
    modules = kernel_tree(tmp_path, without="erofs")
    with pytest.raises(GuestBuildError, match=r"lacks erofs.*guest_kernel_path"):
        load_order(modules)
    with pytest.raises(GuestBuildError, match="not complete"):
        load_order(tmp_path)


def need(*programs: str) -> None:
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def test_modules_are_packed_without_hardware(tmp_path: Path) -> None:
    need("depmod", "mkfs.erofs")
    modules = kernel_tree(tmp_path / "kernel")
    (tmp_path / "work").mkdir()
    image = tmp_path / "modules.erofs"
    pack_modules(modules, RELEASE, tmp_path / "work", image)
    assert image.stat().st_size > 4096
    packed = tmp_path / "work/lib/modules" / RELEASE
    names = {path.name for path in packed.rglob("*.ko*")}
    assert {"bridge.ko", "virtio_net.ko.gz", "overlay.ko"} <= names
    assert "card.ko" not in names
    assert (packed / "modules.dep").is_file()
    # The sources are still there.
    assert (modules / "kernel/sound/card.ko").is_file()


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    path = tmp_path / "agent"
    path.write_bytes(b"the agent")
    return path


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENDSEC_IMAGE_CACHE", raising=False)


async def test_guest_of_a_configured_kernel_is_made_once(tmp_path: Path, agent: Path) -> None:
    need("depmod", "mkfs.erofs")
    kernel_tree(tmp_path / "kernel")
    config = Config(guest_kernel_path=str(tmp_path / f"kernel/boot/vmlinuz-{RELEASE}"))
    lines: list[str] = []
    calls = [ensure_guest(config, tmp_path / "images", agent, lines.append) for _ in range(4)]
    first, *others = await asyncio.gather(*calls)
    assert all(other == first for other in others)
    assert sum("ready" in line for line in lines) == 1
    assert first.kernel_version == RELEASE
    assert first.kernel_elf.read_bytes() == ELF
    assert first.kernel.stat().st_nlink == 2
    initramfs = first.initramfs.read_bytes()
    assert b"the agent" in initramfs
    assert b"00-virtio_ring.ko\n01-virtio.ko\n" in initramfs
    folder = first.kernel.parent
    assert folder.name.startswith(f"{RELEASE}-{first.agent_sha256[:12]}")
    assert not list((tmp_path / "images/guest").rglob(".new-*"))

    # A new agent: another guest of the same kernel. Of three, the oldest goes.
    seen = {folder}
    for text in (b"newer", b"newest"):
        agent.write_bytes(text)
        newer = await ensure_guest(config, tmp_path / "images", agent)
        assert text in newer.initramfs.read_bytes()
        seen.add(newer.kernel.parent)
    assert len(seen) == 3
    assert {path.exists() for path in seen} == {True, False}
    assert not folder.exists()


async def test_builds_are_reproducible(tmp_path: Path, agent: Path) -> None:
    need("depmod", "mkfs.erofs")
    kernel_tree(tmp_path / "kernel")
    config = Config(guest_kernel_path=str(tmp_path / f"kernel/boot/vmlinuz-{RELEASE}"))
    one = await ensure_guest(config, tmp_path / "one", agent)
    two = await ensure_guest(config, tmp_path / "two", agent)
    assert one.initramfs.read_bytes() == two.initramfs.read_bytes()


async def test_configured_kernel_errors(tmp_path: Path, agent: Path) -> None:
    async def attempt(path: Path) -> None:
        await ensure_guest(Config(guest_kernel_path=str(path)), tmp_path / "images", agent)

    with pytest.raises(ConfigError, match="cannot read"):
        await attempt(tmp_path / "none")
    text = tmp_path / "text"
    text.write_text("no kernel" * 1000)
    with pytest.raises(ConfigError, match=r"guest_kernel_path.*no boot header"):
        await attempt(text)
    lonely = tmp_path / "lonely"
    lonely.write_bytes(vmlinuz(gzip.compress(ELF), "9.9.9-nowhere"))
    with pytest.raises(ConfigError, match=r"modules of 9\.9\.9-nowhere"):
        await attempt(lonely)
    with pytest.raises(ConfigError, match="cannot read the guest agent"):
        await ensure_guest(Config(), tmp_path / "images", tmp_path / "no-agent")


class Archive404:
    """An archive of packages that stands in for apt."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.version = "1"
        self.reachable = True
        self.fetched: list[str] = []
        self.listed: list[bool] = []
        monkeypatch.setattr(package, "find_package", self.find)
        monkeypatch.setattr(package, "fetch", self.fetch)

    def find(self, scratch: Path, *, fresh: bool) -> package.KernelPackage:
        self.listed.append(fresh)
        version = self.version if fresh or self.reachable else "old"
        return package.KernelPackage(f"linux-image-{RELEASE}", version, ())

    def fetch(
        self, found: package.KernelPackage, scratch: Path, progress: object
    ) -> package.KernelTree:
        if not self.reachable:
            raise GuestBuildError("404  Not Found")
        self.fetched.append(found.version)
        modules = kernel_tree(scratch / "tree")
        return package.KernelTree(scratch / f"tree/boot/vmlinuz-{RELEASE}", RELEASE, modules)


async def test_packaged_kernel(
    tmp_path: Path, agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("depmod", "mkfs.erofs")
    archive = Archive404(monkeypatch)
    images = tmp_path / "images"
    first = await ensure_guest(Config(), images, agent)
    assert (archive.fetched, archive.listed) == (["1"], [False])
    # Nothing is asked while agent and kernel are there.
    assert await ensure_guest(Config(), images, agent) == first
    assert archive.listed == [False]
    # A new agent looks for a newer kernel, and keeps what it has if there is none.
    agent.write_bytes(b"second")
    await ensure_guest(Config(), images, agent)
    assert archive.fetched == ["1"]
    archive.version = "2"
    archive.reachable = False
    agent.write_bytes(b"third")
    lines: list[str] = []
    third = await ensure_guest(Config(), images, agent, lines.append)
    assert any("keeping the kernel" in line and "404" in line for line in lines)
    assert archive.listed[-2:] == [False, True]
    assert third.kernel_version == RELEASE
    # Without one, the reason is told.
    with pytest.raises(ConfigError, match="404"):
        await ensure_guest(Config(), tmp_path / "empty", agent)
    assert not list((tmp_path / "empty").rglob(".new-*"))


async def test_kernels_are_shared(
    tmp_path: Path, agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("depmod", "mkfs.erofs")
    archive = Archive404(monkeypatch)
    monkeypatch.setenv("OPENDSEC_IMAGE_CACHE", str(tmp_path / "cache"))
    one = await ensure_guest(Config(), tmp_path / "one", agent)
    two = await ensure_guest(Config(), tmp_path / "two", agent)
    assert archive.fetched == ["1"]
    assert one.kernel.stat().st_ino == two.kernel.stat().st_ino


def test_other_machines(tmp_path: Path, agent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(ConfigError, match="x86-64"):
        asyncio.run(ensure_guest(Config(), tmp_path, agent))

    def strange() -> Distribution:
        raise UnsupportedHost("Other Linux")

    monkeypatch.setattr(package, "host_distribution", strange)
    with pytest.raises(GuestBuildError, match="guest_kernel_path"):
        package.find_package(tmp_path, fresh=False)


def test_missing_and_slow_programs() -> None:
    with pytest.raises(GuestBuildError, match="Install the package none-such"):
        run("a step", ["none-such"], timeout_s=5)
    with pytest.raises(GuestBuildError, match="did not end"):
        run("a step", ["sleep", "20"], timeout_s=0.05)
    with pytest.raises(GuestBuildError, match=r"a step: sh failed \(exit status 3\):\nwhy"):
        run("a step", ["sh", "-c", "echo why >&2; exit 3"], timeout_s=5)


def test_command_line() -> None:
    line = guest_cmdline(layers=2)
    assert line.startswith("console=ttyS0 quiet panic=-1 reboot=t opendsec.vm=1 opendsec.layers=2 ")
    assert "opendsec.ip=169.254.0.21/30 opendsec.gw=169.254.0.22" in line
    bare = guest_cmdline(layers=1, network=False, dns=(), modules=False, disks=("layer0", "disk"))
    assert bare.endswith("opendsec.layers=1 opendsec.disks=layer0,disk")


def test_lzma_is_told_from_noise() -> None:
    with pytest.raises(GuestBuildError):
        extract_vmlinux(vmlinuz(zlib.compress(ELF)))
