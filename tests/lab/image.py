# SPDX-License-Identifier: AGPL-3.0-only
"""Builds the root disk of the KVM lab (see ``kvm.py``): Debian 13 with systemd, its packaged
kernel and a Python environment with the locked packages. Kept by what it was made from."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CACHE = Path("/var/tmp/opendsec-lab")
ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")
"""Before a machine's command line: it ends however the program that started it does."""
REPOSITORY = Path(__file__).parents[2]
RELEASE = "trixie"
DISK_MB = 24_576
KEEP_IMAGES = 2
BUILD_TIMEOUT_S = 900
VENV = "/opt/opendsec-venv"
FORMAT = "3"
"""Part of the image's name: raise it with every change that the other parts do not show."""

PACKAGES = (
    *("systemd-sysv", "dbus", "udev", "linux-image-amd64", "kmod", "procps", "util-linux"),
    *("crun", "nftables", "iproute2", "btrfs-progs", "erofs-utils", "e2fsprogs", "mmdebstrap"),
    *("python3", "python3-venv", "ca-certificates", "curl", "openssl", "git", "strace"),
    *("busybox-static", "cpio", "zstd", "xz-utils", "lz4", "dpkg-dev", "qemu-system-x86"),
    *("ovmf", "xorriso"),
)

UNIT = f"""\
[Unit]
Description=The job of the lab
After=multi-user.target
Conflicts=shutdown.target

[Service]
Type=simple
Environment=HOME=/root PATH={VENV}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ExecStart=/usr/local/sbin/lab-job
Delegate=yes
TasksMax=infinity
LimitNOFILE=1048576

[Install]
WantedBy=multi-user.target
"""

JOB = """\
#!/bin/bash
mkdir -p /lab
mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288 lab /lab
bash /lab/job.sh
sync
systemctl poweroff --force --force
"""

UNWANTED_UNITS = (
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "getty@tty1.service",
    "nftables.service",
    "systemd-timesyncd.service",
)


class ImageError(Exception):
    """The image could not be built. The message has the end of the failed program's output."""


@dataclass(frozen=True, slots=True)
class Image:
    """Files that QEMU boots."""

    disk: Path
    kernel: Path
    initrd: Path


def missing_programs() -> list[str]:
    """What a build needs and this machine lacks."""
    return [name for name in ("mmdebstrap", "mkfs.ext4", "unshare") if shutil.which(name) is None]


def ensure_image(say: Callable[[str], None]) -> Image:
    """The image, built when nothing of what it is made from has been seen before.

    Args:
        say: Gets a line of progress now and then.

    Raises:
        ImageError: a program failed or took longer than ``BUILD_TIMEOUT_S``.
    """
    folder = CACHE / f"kvm-{RELEASE}-{_key()}"
    image = Image(folder / "disk", folder / "vmlinuz", folder / "initrd")
    if not (folder / "done").exists():
        say(f"building the lab's image in {folder} (a minute or two, once)")
        with tempfile.TemporaryDirectory(prefix="lab-image-", dir="/var/tmp") as scratch:
            root = Path(scratch) / "root"
            _bootstrap(root)
            say("installing the locked Python packages into it")
            _install_python(root)
            _configure(root)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            shutil.copy(next((root / "boot").glob("vmlinuz-*")), image.kernel)
            shutil.copy(next((root / "boot").glob("initrd.img-*")), image.initrd)
            with image.disk.open("wb") as out:
                out.truncate(DISK_MB << 20)
            _run("mkfs.ext4", "-q", "-d", str(root), "-E", "lazy_itable_init=1", str(image.disk))
        (folder / "done").touch()
        _remove_old(folder)
    return image


def _key() -> str:
    parts = (
        FORMAT,
        *PACKAGES,
        UNIT,
        JOB,
        str(REPOSITORY),
        (REPOSITORY / "requirements/dev.txt").read_text(),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _remove_old(newest: Path) -> None:
    others = sorted(
        (path for path in CACHE.glob(f"kvm-{RELEASE}-*") if path != newest),
        key=lambda path: path.stat().st_mtime,
    )
    for path in others[: max(0, len(others) - KEEP_IMAGES + 1)]:
        shutil.rmtree(path, ignore_errors=True)


def debian_mirror() -> str:
    """Where this machine gets Debian packages from."""
    path = Path("/etc/apt/sources.list.d/debian.sources")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("URIs:"):
                return line.split()[1]
    return "http://deb.debian.org/debian"


def _bootstrap(root: Path) -> None:
    key = "/usr/share/keyrings/debian-archive-keyring.gpg"
    _run(
        "mmdebstrap",
        "--variant=minbase",
        "--mode=root",
        f"--include={','.join(PACKAGES)}",
        "--dpkgopt=path-exclude=/usr/share/doc/*",
        "--dpkgopt=path-exclude=/usr/share/man/*",
        "--dpkgopt=path-exclude=/usr/share/locale/*",
        RELEASE,
        str(root),
        f"deb [signed-by={key}] {debian_mirror()} {RELEASE} main",
    )


def _install_python(root: Path) -> None:
    """The locked packages, compiled for the image's Python; our own by path to the clone."""
    shutil.copy(REPOSITORY / "requirements/dev.txt", root / "tmp/dev.txt")
    for name in ("SSL_CERT_FILE", "PIP_CERT"):
        bundle = os.environ.get(name)
        if bundle and Path(bundle).is_file():
            shutil.copy(bundle, root / "etc/ssl/certs/ca-certificates.crt")
    environment = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "PIP_CERT": "/etc/ssl/certs/ca-certificates.crt",
    }
    environment |= {k: v for k, v in os.environ.items() if k.lower().endswith("_proxy")}
    environment |= {k: v for k, v in os.environ.items() if k.startswith("PIP_INDEX")}
    script = textwrap.dedent(
        f"""\
        set -e
        mount --bind /dev {root}/dev
        mount -t proc proc {root}/proc
        cp /etc/resolv.conf {root}/etc/resolv.conf
        chroot {root} python3 -m venv {VENV}
        chroot {root} {VENV}/bin/pip install -q --no-compile --disable-pip-version-check \\
          --no-cache-dir --require-hashes -r /tmp/dev.txt
        chroot {root} {VENV}/bin/python -m compileall -q -j 2 {VENV}/lib || true
        """
    )
    _run("unshare", "--mount", "--propagation", "private", "bash", "-c", script, env=environment)
    packages = next((root / VENV.lstrip("/") / "lib").glob("python3.*")) / "site-packages"
    (packages / "opendsec-clone.pth").write_text(f"{REPOSITORY}/server\n{REPOSITORY}/sdk/python\n")
    for program, module in (
        ("opendsec", "opendsec.cli.main"),
        ("opendsecd", "opendsec_server.daemon.main"),
    ):
        script_file = root / VENV.lstrip("/") / "bin" / program
        script_file.write_text(
            f"#!{VENV}/bin/python\nimport sys\nfrom {module} import main\nsys.exit(main())\n"
        )
        script_file.chmod(0o755)


def _configure(root: Path) -> None:
    (root / "etc/systemd/system/lab-job.service").write_text(UNIT)
    job = root / "usr/local/sbin/lab-job"
    job.write_text(JOB)
    job.chmod(0o755)
    wants = root / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir(exist_ok=True)
    (wants / "lab-job.service").symlink_to("/etc/systemd/system/lab-job.service")
    for unit in UNWANTED_UNITS:
        link = root / "etc/systemd/system" / unit
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/null")
    (root / "etc/hostname").write_text("lab\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n127.0.1.1 lab\n")
    (root / "etc/fstab").write_text("/dev/vda / ext4 rw,noatime 0 0\n")
    resolv = root / "etc/resolv.conf"
    resolv.unlink(missing_ok=True)
    resolv.write_text("nameserver 10.0.2.3\n")


def _run(*argv: str, env: dict[str, str] | None = None) -> None:
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=BUILD_TIMEOUT_S,
            check=False,
            env=env,
        )
    except subprocess.TimeoutExpired as exc:
        raise ImageError(f"{argv[0]} did not end within {BUILD_TIMEOUT_S} s") from exc
    if done.returncode != 0:
        tail = done.stdout.decode(errors="replace")[-3_000:]
        raise ImageError(f"{argv[0]} failed ({done.returncode}):\n{tail}")
