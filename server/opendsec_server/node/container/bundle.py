# SPDX-License-Identifier: AGPL-3.0-only
"""The OCI configuration of a sandbox (runtime-spec 1.0).

What holds a sandbox in, and why:

* **User namespace**: root in the sandbox is an unprivileged id of its own on the host, and no two
  sandboxes share an id.
* **Capabilities**: only what user-space tools (apt, sudo, su, tar) need inside their own user
  namespace. No SYS_ADMIN, NET_ADMIN, SYS_PTRACE, NET_RAW, MKNOD. The bounding set is the same, so
  nothing executed later can have more.
* **no_new_privs is not set**: ``sudo`` is a set-uid program and could not work. What no_new_privs
  would add is covered: a set-uid program can at most become root *of the sandbox*, with the
  bounding set above, under the same seccomp filter.
* **seccomp** (``seccomp.json``): a list of allowed calls; unknown ones answer ENOSYS, known
  dangerous ones EPERM. Closed: mounting, namespaces (also ``clone`` with namespace flags;
  ``clone3`` answers ENOSYS so that libc falls back), keyrings, BPF, perf, userfaultfd, kexec,
  modules, handles, time, quota, NUMA policy, and io_uring (a steady source of kernel escapes;
  programs fall back to epoll). Sockets of families above AF_PPPOX's neighbours (AF_ALG, AF_VSOCK,
  AF_XDP) are refused. ``ptrace`` is open: debuggers are ordinary tools. Native architecture only.
* **/sys** is an empty tmpfs with the processor topology and the own cgroup shown read-only; the
  host's sysfs, which lists every link and device of the machine, is not there.
* **/proc** is the sandbox's own, with kernel-wide files masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from opendsec_server.contract.limits import PIDS_MAX_DEFAULT
from opendsec_server.contract.node import SandboxSpec
from opendsec_server.node import limits
from opendsec_server.node.network.slotmaker import IDS_PER_SANDBOX

from . import seccomp

AGENT_IN_SANDBOX = "/.opendsec/opendsec-agent"

CAPABILITIES = [
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_NET_BIND_SERVICE",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
]

MASKED_PATHS = [
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/kpagecgroup",
    "/proc/kpagecount",
    "/proc/kpageflags",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
]
"""Hidden from every sandbox. Each costs a mount at every start, so the list is short."""

MASKED_FROM_ROOT = [
    "/proc/asound",
    "/proc/config.gz",
    "/proc/kallsyms",
    "/proc/key-users",
    "/proc/kmsg",
    "/proc/modules",
    "/proc/pagetypeinfo",
    "/proc/slabinfo",
    "/proc/sysrq-trigger",
    "/proc/timer_stats",
    "/proc/vmallocinfo",
    "/proc/zoneinfo",
]
"""Hidden as well where root in the sandbox is root on the host: elsewhere the files' modes and
the missing capabilities keep them closed, or what they show is harmless."""

READ_ONLY_PATHS = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys"]

_SYS_SHOWN = (
    "/sys/devices/system/cpu",
    "/sys/devices/system/node",
    "/sys/kernel/mm/transparent_hugepage",
)

_CPU_PERIOD_US = 100_000
_CPU_SHARES_PER_CORE = 1_024
_CPU_SHARES_MIN = 2
_NOFILE_SOFT = 16_384


@dataclass(frozen=True, slots=True)
class HostTraits:
    """What of the host decides the configuration.

    Attributes:
        agent: The guest agent's binary on the host.
        swap_limited: Whether the memory controller can limit swap.
        cgroup_root: Parent cgroup of all sandboxes.
        nofile_max: Hard limit of open files that the daemon itself has and can pass on.
        seccomp_bpf: The compiled filter, for a runtime that takes it; None: the profile is given.
    """

    agent: Path
    swap_limited: bool
    cgroup_root: str
    nofile_max: int
    seccomp_bpf: str | None


def _mount(destination: str, kind: str, source: str, *options: str) -> dict[str, Any]:
    return {"destination": destination, "type": kind, "source": source, "options": list(options)}


def _mounts(agent: Path, memory_mb: int) -> list[dict[str, Any]]:
    shm_bytes = max(limits.DEV_SHM_BYTES, memory_mb * 1024 * 1024 // 2)
    safe = ("nosuid", "noexec", "nodev")
    mounts = [
        _mount("/proc", "proc", "proc", *safe),
        _mount("/dev", "tmpfs", "tmpfs", "nosuid", "mode=755", "size=64k"),
        _mount(
            "/dev/pts",
            "devpts",
            "devpts",
            "nosuid",
            "noexec",
            "newinstance",
            "ptmxmode=0666",
            "mode=0620",
            "gid=5",
        ),
        _mount("/dev/shm", "tmpfs", "shm", "nosuid", "nodev", "mode=1777", f"size={shm_bytes}"),  # noqa: S108
        _mount("/dev/mqueue", "mqueue", "mqueue", *safe),
        _mount(
            "/run",
            "tmpfs",
            "tmpfs",
            "nosuid",
            "nodev",
            "mode=755",
            f"size={limits.RUN_TMPFS_BYTES}",
        ),
        _mount("/sys", "tmpfs", "tmpfs", *safe, "mode=755", "size=64k"),
        *(
            _mount(path, "bind", path, "bind", "ro", *safe)
            for path in _SYS_SHOWN
            if Path(path).is_dir()
        ),
        _mount("/sys/fs/cgroup", "cgroup", "cgroup", *safe, "ro"),
        _mount(AGENT_IN_SANDBOX, "bind", str(agent), "bind", "ro", "nosuid", "nodev"),
    ]
    return mounts  # noqa: RET504


def _resources(spec: SandboxSpec, traits: HostTraits) -> dict[str, Any]:
    memory_bytes = spec.memory_mb * 1024 * 1024
    memory = {"limit": memory_bytes}
    if traits.swap_limited:
        memory["swap"] = memory_bytes
    return {
        "memory": memory,
        "cpu": {
            "quota": int(spec.cpu * _CPU_PERIOD_US),
            "period": _CPU_PERIOD_US,
            "shares": max(_CPU_SHARES_MIN, int(spec.cpu * _CPU_SHARES_PER_CORE)),
        },
        "pids": {"limit": PIDS_MAX_DEFAULT},
        "devices": [{"allow": False, "access": "rwm"}],
    }


def oci_config(
    spec: SandboxSpec, traits: HostTraits, *, netns_path: str, id_base: int | None
) -> dict[str, Any]:
    """The whole ``config.json``.

    Args:
        spec: What was asked for.
        traits: The host.
        netns_path: Where the runtime finds the slot's network namespace.
        id_base: First host id of the sandbox; None: no user namespace.
    """
    namespaces: list[dict[str, str]] = [
        {"type": kind} for kind in ("pid", "ipc", "uts", "mount", "cgroup")
    ]
    namespaces.append({"type": "network", "path": netns_path})
    linux: dict[str, Any] = {
        "cgroupsPath": f"{traits.cgroup_root}/{spec.sandbox_id}",
        "resources": _resources(spec, traits),
        "namespaces": namespaces,
        "maskedPaths": MASKED_PATHS if id_base is not None else MASKED_PATHS + MASKED_FROM_ROOT,
        "readonlyPaths": READ_ONLY_PATHS,
    }
    if id_base is not None:
        namespaces.append({"type": "user"})
        mapping = [{"containerID": 0, "hostID": id_base, "size": IDS_PER_SANDBOX}]
        linux["uidMappings"] = linux["gidMappings"] = mapping
    capabilities = dict.fromkeys(("bounding", "effective", "permitted"), CAPABILITIES)
    annotations = {}
    if traits.seccomp_bpf is not None:
        annotations[seccomp.BPF_ANNOTATION] = traits.seccomp_bpf
    else:
        linux["seccomp"] = seccomp.profile()
    return {
        "ociVersion": "1.0.2",
        "annotations": annotations,
        "hostname": spec.sandbox_id,
        "root": {"path": "rootfs"},
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": [AGENT_IN_SANDBOX],
            "env": [
                "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                "LANG=C.UTF-8",
                "HOME=/root",
            ],
            "cwd": "/",
            "capabilities": capabilities,
            "noNewPrivileges": False,
            "rlimits": [
                {
                    "type": "RLIMIT_NOFILE",
                    "soft": min(_NOFILE_SOFT, traits.nofile_max),
                    "hard": traits.nofile_max,
                },
                {"type": "RLIMIT_CORE", "soft": 0, "hard": 0},
            ],
        },
        "mounts": _mounts(traits.agent, spec.memory_mb),
        "linux": linux,
    }


def write_bundle(
    bundle: Path, spec: SandboxSpec, traits: HostTraits, *, netns_path: str, id_base: int | None
) -> None:
    """Write ``bundle/config.json``."""
    config = oci_config(spec, traits, netns_path=netns_path, id_base=id_base)
    (bundle / "config.json").write_bytes(msgspec.json.encode(config))
