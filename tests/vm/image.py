# SPDX-License-Identifier: AGPL-3.0-only
"""Builds a disk image like those that distributions publish for clouds: systemd, cloud-init, GRUB
for BIOS and for UEFI. Kept by what it was made from."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from opendsec_server.images.apt_sources import host_distribution, mirror_lines

CACHE = Path(os.environ.get("OPENDSEC_IMAGE_CACHE", "/var/tmp/opendsec-test-images"))
BUILD_TIMEOUT_S = 900
FORMAT = "3"
"""Part of the image's name: raise it with every change that the other parts do not show."""

DISK_MB = 2_048
SECTOR = 512
BIOS_START, BIOS_SECTORS = 2_048, 2_048
ESP_START, ESP_SECTORS = 4_096, 32_768
ROOT_START = ESP_START + ESP_SECTORS
ROOT_SECTORS = DISK_MB * 2_048 - ROOT_START - 2_048

PACKAGES = (
    *("systemd-sysv", "systemd-resolved", "dbus", "udev", "kmod", "procps", "iproute2", "fdisk"),
    *("linux-image-cloud-amd64", "zstd", "cloud-init", "sudo", "ca-certificates"),
    *("grub-pc-bin", "grub-efi-amd64-bin", "grub-common"),
)

GRUB = """\
search --no-floppy --label --set=root cloudroot
set prefix=($root)/boot/grub
linux /vmlinuz root=LABEL=cloudroot rw console=tty0 console=ttyS0,115200 net.ifnames=0 quiet
initrd /initrd.img
boot
"""
GRUB_MODULES = ("part_gpt", "ext2", "search", "search_label", "linux", "normal", "boot")

SET_UP = r"""set -e
printf 'MODULES=list\nCOMPRESS=zstd\n' > /etc/initramfs-tools/conf.d/small
printf 'virtio_pci\nvirtio_blk\next4\n' >> /etc/initramfs-tools/modules
update-initramfs -u
echo 'LABEL=cloudroot / ext4 defaults 0 1' > /etc/fstab
passwd --delete root >/dev/null
systemctl enable systemd-networkd systemd-resolved
systemctl mask apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer \
  e2scrub_reap.service fstrim.timer systemd-networkd-wait-online.service systemd-timesyncd.service
# What an emulated processor would only be slow with.
for module in kvm kvm_amd kvm_intel aesni_intel ghash_clmulni_intel sha512_ssse3 cryptd \
  crc32_pclmul crct10dif_pclmul powernow_k8 pcspkr psmouse; do
  echo "install $module /bin/false" >> /etc/modprobe.d/slow.conf
done
cat > /etc/cloud/cloud.cfg.d/99-small.cfg <<'EOF'
datasource_list: [NoCloud, None]
locale: false
apt: {preserve_sources_list: true}
cloud_init_modules: [bootcmd, write-files, growpart, resizefs, set_hostname, users-groups]
cloud_config_modules: [runcmd]
cloud_final_modules: [scripts-user, final-message]
EOF
ln -sf /run/systemd/resolve/stub-resolv.conf /etc/resolv.conf
: > /etc/machine-id
rm -f /etc/hostname /var/lib/dbus/machine-id
mkdir -p /boot/grub
"""


class ImageError(Exception):
    """The image could not be built. The message has the end of the failed program's output."""


@dataclass(frozen=True, slots=True)
class CloudImage:
    """Files that a sandbox boots.

    Attributes:
        raw: Whole disk, GPT, boots by BIOS and by UEFI; sparse.
        qcow2: The same.
        kernel: Its kernel, for a boot without a boot loader.
        initrd: And its initial file system.
    """

    raw: Path
    qcow2: Path
    kernel: Path
    initrd: Path


def missing_programs() -> list[str]:
    """What a build needs and this machine lacks."""
    wanted = ("mmdebstrap", "mkfs.ext4", "mkfs.vfat", "mcopy", "sfdisk", "qemu-img")
    return [name for name in wanted if shutil.which(name) is None]


def ensure_image(say: Callable[[str], None]) -> CloudImage:
    """The image, built when nothing of what it is made from has been seen before.

    Args:
        say: Gets a line of progress now and then.

    Raises:
        ImageError: a program failed or took longer than ``BUILD_TIMEOUT_S``.
    """
    parts = (FORMAT, *PACKAGES, GRUB, SET_UP, *GRUB_MODULES, *mirror_lines(host_distribution()))
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    folder = CACHE / f"cloud-{key}"
    image = CloudImage(
        folder / "disk.raw", folder / "disk.qcow2", folder / "vmlinuz", folder / "initrd"
    )
    if not (folder / "done").exists():
        say(f"building a cloud image in {folder} (about two minutes, once)")
        for old in CACHE.glob("cloud-*"):
            shutil.rmtree(old, ignore_errors=True)
        folder.mkdir(parents=True)
        with tempfile.TemporaryDirectory(prefix="cloud-image-", dir="/var/tmp") as scratch:
            Path(scratch).chmod(0o755)
            _build(Path(scratch), image)
        (folder / "done").touch()
    return image


def _build(scratch: Path, image: CloudImage) -> None:
    root = scratch / "root"
    _bootstrap(root)
    _in(root, SET_UP)
    (root / "boot/grub/early.cfg").write_text(GRUB)
    core, efi = "boot/grub/core.img", "boot/grub/bootx64.efi"
    modules = " ".join(GRUB_MODULES)
    common = "-p /boot/grub -c /boot/grub/early.cfg"
    _in(root, f"grub-mkimage -O i386-pc {common} -o /{core} biosdisk {modules}")
    _in(root, f"grub-mkimage -O x86_64-efi {common} -o /{efi} {modules}")
    shutil.copy(next((root / "boot").glob("vmlinuz-*")), image.kernel)
    shutil.copy(next((root / "boot").glob("initrd.img-*")), image.initrd)

    disk = scratch / "disk.raw"
    with disk.open("wb") as out:
        out.truncate(DISK_MB << 20)
    table = (
        "label: gpt\n"
        f"start={BIOS_START}, size={BIOS_SECTORS}, type=21686148-6449-6E6F-744E-656564454649\n"
        f"start={ESP_START}, size={ESP_SECTORS}, type=C12A7328-F81F-11D2-BA4B-00A0C93EC93B\n"
        f"start={ROOT_START}, size={ROOT_SECTORS}, type=0FC63DAF-8483-4772-8E79-3D69D8477DE4\n"
    )
    _run("sfdisk", "-q", str(disk), stdin=table)
    _bios_loader(disk, root / "usr/lib/grub/i386-pc/boot.img", root / core)

    esp = scratch / "esp"
    with esp.open("wb") as out:
        out.truncate(ESP_SECTORS * SECTOR)
    _run("mkfs.vfat", "-n", "ESP", str(esp))
    _run("mmd", "-i", str(esp), "::/EFI", "::/EFI/BOOT")
    _run("mcopy", "-i", str(esp), str(root / efi), "::/EFI/BOOT/BOOTX64.EFI")

    shutil.rmtree(root / "usr/lib/grub")
    rootfs = scratch / "rootfs"
    with rootfs.open("wb") as out:
        out.truncate(ROOT_SECTORS * SECTOR)
    _run("mkfs.ext4", "-q", "-L", "cloudroot", "-d", str(root), str(rootfs))
    for part, start in ((esp, ESP_START), (rootfs, ROOT_START)):
        _run("dd", f"if={part}", f"of={disk}", "bs=1M", f"seek={start * SECTOR}",
             "oflag=seek_bytes", "conv=notrunc,sparse")  # fmt: skip
    _run("qemu-img", "convert", "-O", "qcow2", str(disk), str(image.qcow2))
    _run("cp", "--sparse=always", str(disk), str(image.raw))


def _bios_loader(disk: Path, boot: Path, core: Path) -> None:
    """What grub-bios-setup does, which wants a device and a mounted file system."""
    first = bytearray(boot.read_bytes())
    struct.pack_into("<Q", first, 0x5C, BIOS_START)
    first[0x64] = 0xFF  # the drive that the firmware started from
    first[0x66:0x68] = b"\x90\x90"  # no floppy's quirks
    second = bytearray(core.read_bytes())
    sectors = -(-len(second) // SECTOR)
    struct.pack_into("<QHH", second, 0x1F4, BIOS_START + 1, sectors - 1, 0x820)
    with disk.open("r+b") as out:
        out.write(first[:440])
        out.seek(BIOS_START * SECTOR)
        out.write(second)


def _bootstrap(root: Path) -> None:
    distribution = host_distribution()
    options = ["--dpkgopt", "force-unsafe-io", "--aptopt", 'APT::Install-Recommends "false"']
    for folder in ("man", "info", "doc", "locale"):
        options += ["--dpkgopt", f"path-exclude=/usr/share/{folder}/*"]
    _run(
        "mmdebstrap", "--mode=root", "--variant=minbase", "--include", ",".join(PACKAGES),
        "--aptopt", 'Acquire::Languages "none"', *options, distribution.codename, str(root), "-",
        stdin="\n".join(mirror_lines(distribution)) + "\n",
    )  # fmt: skip


def _in(root: Path, script: str) -> None:
    _run("chroot", str(root), "/bin/sh", "-c", script)


def _run(*argv: str, stdin: str = "") -> None:
    done = subprocess.run(
        argv,
        input=stdin,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=BUILD_TIMEOUT_S,
        check=False,
        env={**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"},
    )
    if done.returncode != 0:
        raise ImageError(f"{argv[0]} failed: {done.stdout[-2_000:]}")
