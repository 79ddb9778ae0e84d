# SPDX-License-Identifier: AGPL-3.0-only
"""The checks of ``opendsecd doctor``: each says what it saw and how to mend what is wrong."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from opendsec_server.binaries import find_agent, find_edge, find_ram
from opendsec_server.config import Config, ConfigError
from opendsec_server.contract.errors import NotSupported
from opendsec_server.node.machines.firmware import find_uefi

Status = Literal["ok", "warn", "fail", "skip"]

KERNEL_MIN = (5, 19)
KERNEL_WHY = "overlayfs over id-mapped layers needs Linux 5.19"
DISK_FREE_MB_WARN = 10_240
MEMORY_MB_WARN = 2_048
PROGRAM_TIMEOUT_S = 20.0


class Check(msgspec.Struct, frozen=True):
    """Result of one check."""

    name: str
    status: Status
    detail: str
    """What was seen."""
    remedy: str = ""
    """What to do, in words that can be followed. Empty when nothing is wrong."""


def check_root() -> Check:
    if os.geteuid() == 0:
        return Check("root", "ok", "running as root")
    return Check("root", "fail", f"running as uid {os.geteuid()}", "Run it with sudo.")


def check_platform() -> Check:
    machine, system = platform.machine(), platform.system()
    python = ".".join(map(str, sys.version_info[:3]))
    if system != "Linux":
        return Check("platform", "fail", system, "Sandboxes need a Linux machine.")
    status: Status = "ok" if machine in ("x86_64", "aarch64") else "warn"
    return Check("platform", status, f"{system} on {machine}, Python {python}")


def check_kernel() -> Check:
    release = platform.release()
    digits = tuple(int(part) for part in release.split("-")[0].split(".")[:2])
    if digits >= KERNEL_MIN:
        return Check("kernel", "ok", release)
    return Check(
        "kernel", "warn", release, f"{KERNEL_WHY}: sandboxes run without user namespaces here."
    )


def check_filesystems() -> Check:
    known = Path("/proc/filesystems").read_text().split()
    missing = []
    for name in ("overlay", "erofs", "btrfs"):
        if name not in known:
            subprocess.run(["modprobe", name], capture_output=True, check=False)
            known = Path("/proc/filesystems").read_text().split()
        if name not in known:
            missing.append(name)
    if not missing:
        return Check("filesystems", "ok", "overlay, erofs and btrfs are available")
    return Check(
        "filesystems",
        "fail",
        f"the kernel lacks {', '.join(missing)}",
        "Install the distribution's full kernel modules package "
        "(Ubuntu: linux-modules-extra-$(uname -r)), then `modprobe` each.",
    )


def check_cgroups() -> Check:
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        controllers = set((root / "cgroup.controllers").read_text().split())
        lacking = {"cpu", "memory", "pids"} - controllers
        if lacking:
            return Check(
                "cgroups",
                "fail",
                f"cgroup v2 without {', '.join(sorted(lacking))}",
                "Boot with these controllers enabled "
                "(kernel parameter cgroup_enable=memory, for instance).",
            )
        return Check("cgroups", "ok", "cgroup v2")
    lacking = {name for name in ("cpu", "memory", "pids") if not (root / name).is_dir()}
    if lacking:
        return Check(
            "cgroups",
            "fail",
            f"cgroup v1 without {', '.join(sorted(lacking))}",
            "Mount the controllers, or boot with systemd.unified_cgroup_hierarchy=1.",
        )
    kind = "hybrid" if (root / "unified").is_dir() else "v1"
    return Check("cgroups", "ok", f"cgroup {kind}")


def check_user_namespaces(config: Config) -> Check:
    if config.user_namespaces == "off":
        return Check(
            "user namespaces",
            "warn",
            "switched off by user_namespaces = off",
            "Remove the setting: root in a sandbox is then root of a namespace only.",
        )
    limit = Path("/proc/sys/user/max_user_namespaces")
    if limit.exists() and int(limit.read_text()) == 0:
        return Check(
            "user namespaces",
            "fail",
            "user.max_user_namespaces is 0",
            "sysctl -w user.max_user_namespaces=100000, and keep it in /etc/sysctl.d.",
        )
    if not Path("/proc/self/ns/user").exists():
        return Check("user namespaces", "fail", "not in this kernel", "Use a distribution kernel.")
    return Check("user namespaces", "ok", "available")


def _program(name: str, package: str, argument: str = "--version") -> Check:
    found = shutil.which(name)
    if found is None:
        return Check(name, "fail", "not found", f"apt-get install {package}")
    try:
        run = subprocess.run(
            [found, argument],
            capture_output=True,
            text=True,
            timeout=PROGRAM_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        return Check(name, "fail", f"does not run: {exc}", f"apt-get install --reinstall {package}")
    first = (run.stdout or run.stderr).strip().splitlines()
    return Check(name, "ok", first[0] if first else found)


def check_oci_runtime(config: Config) -> Check:
    package = config.oci_runtime if config.oci_runtime in ("crun", "runc") else "crun"
    check = _program(config.oci_runtime, package)
    return Check("OCI runtime", check.status, check.detail, check.remedy)


def check_nft() -> Check:
    check = _program("nft", "nftables")
    if check.status != "ok":
        return check
    rule = "table inet opendsec_doctor {\n chain c {\n counter\n }\n}\n"
    run = subprocess.run(
        ["nft", "-c", "-f", "-"],
        input=rule,
        capture_output=True,
        text=True,
        timeout=PROGRAM_TIMEOUT_S,
        check=False,
    )
    if run.returncode == 0:
        return Check("nftables", "ok", check.detail)
    return Check(
        "nftables",
        "fail",
        run.stderr.strip().splitlines()[0] if run.stderr.strip() else "nft refuses a table",
        "The kernel needs nf_tables (modprobe nf_tables nft_masq nft_nat nft_ct).",
    )


def check_image_tools() -> Check:
    lacking = [
        package
        for program, package in (
            ("mkfs.erofs", "erofs-utils"),
            ("mmdebstrap", "mmdebstrap"),
            ("mkfs.btrfs", "btrfs-progs"),
            ("skopeo", "skopeo"),
        )
        if shutil.which(program) is None
    ]
    if lacking:
        return Check(
            "image tools",
            "fail",
            f"missing: {', '.join(lacking)}",
            f"apt-get install {' '.join(lacking)}",
        )
    return Check("image tools", "ok", "mkfs.erofs, mkfs.btrfs, mmdebstrap and skopeo are there")


def check_full_machines(config: Config) -> Check:
    lacking = [
        package
        for program, package in (
            ("qemu-system-x86_64", "qemu-system-x86"),
            ("qemu-img", "qemu-utils"),
            ("xorriso", "xorriso"),
        )
        if shutil.which(program) is None
    ]
    if lacking:
        return Check(
            "full VMs",
            "skip",
            f"missing: {', '.join(lacking)}; other backends do not need it",
            f"apt-get install {' '.join(lacking)}",
        )
    try:
        uefi = find_uefi(config.firmware_dir)
    except NotSupported as exc:
        return Check("full VMs", "ok", f"by BIOS; not by UEFI: {exc.message}", exc.remediation)
    return Check("full VMs", "ok", f"by BIOS, and by UEFI from {uefi.code}")


def check_own_programs(config: Config) -> Check:
    try:
        found = [str(find_agent(config)), str(find_edge(config)), str(find_ram())]
    except ConfigError as exc:
        return Check("programs", "fail", "our own programs are not complete", str(exc))
    return Check("programs", "ok", ", ".join(found))


def check_disk(config: Config) -> Check:
    path = config.state_path
    while not path.exists():
        path = path.parent
    free_mb = shutil.disk_usage(path).free // (1024 * 1024)
    if free_mb < DISK_FREE_MB_WARN:
        return Check(
            "disk",
            "warn",
            f"{free_mb} MB free at {path}",
            f"Free space, or move state_dir; {DISK_FREE_MB_WARN} MB is a good start.",
        )
    return Check("disk", "ok", f"{free_mb} MB free at {path}")


def check_memory() -> Check:
    fields = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    available_mb = int(fields["MemAvailable"].split()[0]) // 1024
    if available_mb < MEMORY_MB_WARN:
        return Check(
            "memory",
            "warn",
            f"{available_mb} MB available",
            "Few sandboxes will fit; add memory or stop other programs.",
        )
    return Check("memory", "ok", f"{available_mb} MB available")


def check_network_overlap(config: Config) -> Check:
    import ipaddress

    ours = ipaddress.ip_network(config.network_cidr)
    run = subprocess.run(
        ["ip", "-4", "-o", "addr"],
        capture_output=True,
        text=True,
        timeout=PROGRAM_TIMEOUT_S,
        check=False,
    )
    for line in run.stdout.splitlines():
        fields = line.split()
        if fields[1].startswith(config.instance) and fields[1][len(config.instance) :].isdigit():
            continue
        theirs = ipaddress.ip_interface(fields[3]).network
        if ours.overlaps(theirs):
            return Check(
                "network",
                "fail",
                f"{ours} overlaps {theirs} on {fields[1]}",
                "Set network_cidr to a private range that this machine does not use.",
            )
    return Check("network", "ok", f"{ours} is free")


def check_forwarding() -> Check:
    """Docker sets the FORWARD policy to drop, which would cut sandboxes off."""
    if shutil.which("iptables") is None:
        return Check("forwarding", "ok", "no iptables rules in the way")
    run = subprocess.run(
        ["iptables", "-S", "FORWARD"],
        capture_output=True,
        text=True,
        timeout=PROGRAM_TIMEOUT_S,
        check=False,
    )
    if "-P FORWARD DROP" not in run.stdout:
        return Check("forwarding", "ok", "the FORWARD policy accepts")
    if "DOCKER-USER" in run.stdout:
        return Check("forwarding", "ok", "FORWARD drops; we pass through DOCKER-USER")
    return Check(
        "forwarding",
        "warn",
        "the FORWARD policy is DROP",
        "Sandboxes cannot reach the internet. Accept traffic from and to the sandbox links.",
    )


def check_dns() -> Check:
    try:
        servers = [
            line.split()[1]
            for line in Path("/etc/resolv.conf").read_text().splitlines()
            if line.startswith("nameserver")
        ]
    except (OSError, IndexError):
        servers = []
    if servers:
        return Check("DNS", "ok", f"resolver {', '.join(servers)}")
    return Check(
        "DNS", "warn", "no resolver in /etc/resolv.conf", "Set dns_servers in the settings."
    )


def check_container(config: Config) -> Check:
    """Run a real container that prints one word."""
    runtime = shutil.which(config.oci_runtime)
    busybox = shutil.which("true")
    if runtime is None or busybox is None or os.geteuid() != 0:
        return Check("container", "skip", "not tried: see the checks above")
    from .container_probe import run_probe

    with tempfile.TemporaryDirectory(prefix="opendsec-doctor-") as folder:
        problem = run_probe(Path(folder), runtime, instance=config.instance)
    if problem is None:
        return Check("container", "ok", "a container with all namespaces and limits ran")
    return Check(
        "container",
        "fail",
        problem,
        "See the message of the OCI runtime; a newer crun, or runc, often mends it.",
    )


ALL_CHECKS: tuple[Callable[[Config], Check], ...] = (
    lambda config: check_root(),
    lambda config: check_platform(),
    lambda config: check_kernel(),
    lambda config: check_filesystems(),
    lambda config: check_cgroups(),
    check_user_namespaces,
    check_oci_runtime,
    lambda config: check_nft(),
    lambda config: check_image_tools(),
    check_full_machines,
    check_own_programs,
    check_disk,
    lambda config: check_memory(),
    check_network_overlap,
    lambda config: check_forwarding(),
    lambda config: check_dns(),
    check_container,
)
