# SPDX-License-Identifier: AGPL-3.0-only
"""Boots the emulated host and runs one command in it. See README.md beside this file."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.lab.image import ENDS_WITH_US

CACHE = Path("/var/tmp/opendsec-lab")
MODULES = (
    "virtio_pci",
    "virtio_net",
    "virtio_blk",
    "virtio_rng",
    "9pnet_virtio",
    "9p",
    "overlay",
)
DISK_MB = 16_384

INIT = """#!/bin/busybox sh
# Mounts this machine's root under an overlay in memory and hands over to it.
bb=/bin/busybox
$bb mkdir -p /proc /sys /dev /lower /mem /root
$bb mount -t proc proc /proc
$bb mount -t devtmpfs dev /dev
for module in {modules}; do $bb modprobe -q $module; done
$bb mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,cache=loose,ro host /lower
$bb mount -t tmpfs -o size=75% mem /mem
$bb mkdir -p /mem/upper /mem/work
$bb mount -t overlay -o lowerdir=/lower,upperdir=/mem/upper,workdir=/mem/work root /root
$bb mkdir -p /root/lib/modules /root/lab
$bb mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,cache=loose,ro modules \\
    /root/lib/modules
$bb mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288 lab /root/lab
$bb mount --move /dev /root/dev
$bb umount /proc
exec $bb switch_root /root /bin/bash /lab/job.sh </root/dev/null >/root/dev/ttyS0 2>&1
"""

JOB = """#!/bin/bash
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root {environment}
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t cgroup2 -o nsdelegate cgroup2 /sys/fs/cgroup
mkdir -p /sys/fs/cgroup/init
echo $$ >/sys/fs/cgroup/init/cgroup.procs
echo "+cpu +memory +pids +io +cpuset" >/sys/fs/cgroup/cgroup.subtree_control
mkdir -p /dev/pts /dev/shm
mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts /dev/pts
mount -t tmpfs shm /dev/shm
mount -t tmpfs run /run
mount -t tmpfs tmp /tmp
ip link set lo up
ip link set eth0 up && ip addr add 10.0.2.15/24 dev eth0 && ip route add default via 10.0.2.2
echo nameserver 10.0.2.3 >/tmp/resolv.conf && mount --bind /tmp/resolv.conf /etc/resolv.conf
for module in erofs btrfs loop veth nf_tables nft_ct nft_nat nft_masq nft_chain_nat; do
  modprobe -q $module
done
# A disk of its own for state: an overlay cannot carry another overlay's writable layer.
mkfs.ext4 -q /dev/vda && mkdir -p /var/tmp && mount /dev/vda /var/tmp
mkdir -p /var/tmp/opendsec-test-images
[ -d /lab/images ] && cp -a /lab/images/. /var/tmp/opendsec-test-images/
cd {folder}
( {command} ) </dev/null >/dev/ttyS1 2>&1
echo $? >/lab/status
sync
echo o >/proc/sysrq-trigger
sleep 60
"""


def fetch_kernel(release: str) -> Path:
    """Download and unpack the release's kernel package, once. Returns the unpacked folder."""
    folder = CACHE / release
    if (folder / "done").exists():
        return folder
    lists = folder / "lists" / "partial"
    lists.mkdir(parents=True, exist_ok=True)
    sources = folder / "sources.list"
    host_source = next(
        (
            line.split()[1]
            for path in (Path("/etc/apt/sources.list.d/debian.sources"),)
            if path.exists()
            for line in path.read_text().splitlines()
            if line.startswith("URIs:")
        ),
        "http://deb.debian.org/debian",
    )
    sources.write_text(
        f"deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {host_source} "
        f"{release} main\n"
    )
    options = [
        f"-oDir::Etc::sourcelist={sources}",
        "-oDir::Etc::sourceparts=-",
        f"-oDir::State::Lists={lists.parent}",
        f"-oDir::Cache={folder}",
        "-oAPT::Sandbox::User=root",
    ]
    run = subprocess.run
    run(["apt-get", *options, "update", "-qq"], check=True)
    depends = run(
        ["apt-cache", *options, "depends", "linux-image-amd64"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    kernel = next(line.split()[1] for line in depends.splitlines() if "Depends:" in line)
    run(
        ["apt-get", *options, "download", "-q", kernel, "busybox-static"],
        check=True,
        cwd=folder,
        stdout=subprocess.DEVNULL,
    )
    for package in folder.glob("*.deb"):
        run(["dpkg", "-x", str(package), str(folder / "tree")], check=True)
        package.unlink()
    (folder / "done").touch()
    return folder


def kernel_files(folder: Path) -> tuple[Path, Path, Path]:
    """Kernel image, modules folder, busybox. Their place differs between releases."""
    tree = folder / "tree"
    modules = next(
        path for path in (tree / "usr/lib/modules", tree / "lib/modules") if path.exists()
    )
    busybox = next(
        path for path in (tree / "usr/bin/busybox", tree / "bin/busybox") if path.exists()
    )
    return next((tree / "boot").glob("vmlinuz*")), modules, busybox


def build_initrd(folder: Path, modules: Path, busybox: Path) -> Path:
    """A small initramfs: busybox, the modules needed to mount the root, and our init."""
    initrd = folder / "initrd"
    root = folder / "initrd.root"
    shutil.rmtree(root, ignore_errors=True)
    (root / "bin").mkdir(parents=True)
    shutil.copy(busybox, root / "bin/busybox")
    version = next(modules.iterdir()).name
    subprocess.run(["depmod", "-b", str(modules.parents[0].parent), version], check=False)
    _copy_modules(modules / version, root / "lib/modules" / version)
    subprocess.run(["depmod", "-b", str(root), version], check=True, stderr=subprocess.DEVNULL)
    init = root / "init"
    init.write_text(INIT.format(modules=" ".join(MODULES)))
    init.chmod(0o755)
    with initrd.open("wb") as out:
        names = subprocess.run(["find", "."], cwd=root, check=True, capture_output=True).stdout
        subprocess.run(
            ["cpio", "--quiet", "-o", "-H", "newc"], cwd=root, input=names, stdout=out, check=True
        )
    return initrd


def _copy_modules(source: Path, target: Path) -> None:
    wanted = set(MODULES)
    depends: dict[str, list[str]] = {}
    files: dict[str, Path] = {}
    for path in (source / "kernel").rglob("*.ko*"):
        files[path.name.split(".")[0].replace("-", "_")] = path
    todo = [name.replace("-", "_") for name in wanted]
    while todo:
        name = todo.pop()
        path = files.get(name)
        if path is None or name in depends:
            continue
        shown = subprocess.run(
            ["modinfo", "-F", "depends", str(path)], capture_output=True, text=True, check=True
        ).stdout.strip()
        depends[name] = [part.replace("-", "_") for part in shown.split(",") if part]
        todo += depends[name]
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)


def run_in_lab(
    command: list[str], *, release: str, memory_mb: int, cpus: int, timeout_s: int
) -> int:
    """Boot, run, power off. Prints the command's output as it comes.

    Returns:
        The command's exit status; 124 when the time was up, 125 when the host did not boot.
    """
    folder = fetch_kernel(release)
    kernel, modules, busybox = kernel_files(folder)
    initrd = build_initrd(folder, modules, busybox)
    with tempfile.TemporaryDirectory(prefix="opendsec-lab-", dir="/var/tmp") as scratch:
        lab = Path(scratch) / "lab"
        lab.mkdir()
        images = Path(os.environ.get("OPENDSEC_IMAGE_CACHE", "/var/tmp/opendsec-test-images"))
        if images.is_dir():
            shutil.copytree(images, lab / "images", symlinks=True)
        environment = " ".join(
            f"{name}={shlex.quote(os.environ[name])}"
            for name in ("SSL_CERT_FILE", "PIP_CERT", "CI")
            if name in os.environ
        )
        (lab / "job.sh").write_text(
            JOB.format(
                environment=environment,
                folder=shlex.quote(str(Path.cwd())),
                command=shlex.join(command),
            )
        )
        disk = Path(scratch) / "disk"
        with disk.open("wb") as out:
            out.truncate(DISK_MB * 1024 * 1024)
        argv = [
            *ENDS_WITH_US,
            *("qemu-system-x86_64", "-M", "q35", "-accel", "tcg,thread=multi"),
            *("-cpu", "max", "-smp", str(cpus), "-m", str(memory_mb)),
            *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            *("-kernel", str(kernel), "-initrd", str(initrd)),
            *("-append", "console=ttyS0 panic=-1 quiet"),
            *("-chardev", f"file,id=console,path={lab}/console.log", "-serial", "chardev:console"),
            *("-chardev", "stdio,id=out,signal=off", "-serial", "chardev:out"),
            *("-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net"),
            *("-drive", f"file={disk},if=virtio,format=raw,cache=unsafe"),
            *("-device", "virtio-rng-pci"),
            *_share("host", Path("/"), readonly=True),
            *_share("modules", modules, readonly=True),
            *_share("lab", lab, readonly=False),
        ]
        try:
            subprocess.run(argv, stdin=subprocess.DEVNULL, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            print(f"the lab's time was up ({timeout_s} s)", file=sys.stderr)
            return 124
        try:
            return int((lab / "status").read_text())
        except (OSError, ValueError):
            console = (lab / "console.log").read_text(errors="replace")
            print(f"the emulated host did not finish:\n{console[-3000:]}", file=sys.stderr)
            return 125


def _share(tag: str, path: Path, *, readonly: bool) -> list[str]:
    mode = ",readonly=on" if readonly else ""
    return [
        "-fsdev",
        f"local,id={tag},path={path},security_model=none,multidevs=remap{mode}",
        "-device",
        f"virtio-9p-pci,fsdev={tag},mount_tag={tag}",
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Run a command on an emulated host.")
    parser.add_argument("--release", default="trixie", choices=("trixie", "bookworm"))
    parser.add_argument("--memory-mb", type=int, default=4_096)
    parser.add_argument("--cpus", type=int, default=2)
    parser.add_argument("--timeout-s", type=int, default=1_200)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    for program in ("qemu-system-x86_64", "cpio", "depmod", "modinfo"):
        if shutil.which(program) is None:
            parser.exit(2, f"{program} is missing: apt-get install qemu-system-x86 cpio kmod\n")
    sys.exit(
        run_in_lab(
            options.command,
            release=options.release,
            memory_mb=options.memory_mb,
            cpus=options.cpus,
            timeout_s=options.timeout_s,
        )
    )


if __name__ == "__main__":
    main()
