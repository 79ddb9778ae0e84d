# SPDX-License-Identifier: AGPL-3.0-only
"""The machine that we build, as requests to Firecracker's API.

The agent is reached over TCP through the tap, not over vsock. Firecracker resets the vsock device
when a snapshot is loaded: every connection of the guest breaks, and the guest's driver has to
notice before new ones work; the host's end is a socket file whose path is part of the snapshot.
The network needs none of that: a restored clone has the same address and link address inside, an
own slot outside, and answers as soon as its processors run. Also, the edge reaches containers
and machines in the same way.

A metadata service (MMDS) is not configured, so there is none. The generation id (VMGenID) is
always there and changes with each restore: the guest's kernel reseeds itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opendsec_server.contract.errors import SandboxStartFailed
from opendsec_server.node.vmm.base import VmConfig

from .program import Features

VCPUS_MAX = 32
DISKS_MAX = 13
"""Of about 17 devices on x86_64; network, balloon and entropy take three."""
NETWORK_ID = "eth0"
KERNEL = "kernel"
INITRAMFS = "initramfs"
DISKS = "disks"
"""Names inside the jail. They are the same in every jail, since saved devices remember them."""

SERIAL_BYTES_PER_S = 64 * 1024
SERIAL_BURST_BYTES = 1024 * 1024
_QUIET_KEYBOARD = "i8042.noaux i8042.nomux i8042.nopnp i8042.dumbkbd"
"""Firecracker's keyboard controller knows only the reset line; probing for more takes time."""

Request = tuple[str, str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Bounds on one VM's devices; None: none. Bytes and operations are per second.

    Attributes:
        disk_bytes: Of each writable disk.
        disk_operations: Of each writable disk.
        network_bytes: In each direction.
    """

    disk_bytes: int | None = None
    disk_operations: int | None = None
    network_bytes: int | None = None


def disk_path(serial: str) -> str:
    """Where a disk is inside the jail."""
    return f"{DISKS}/{serial}"


def is_pmem(features: Features, *, read_only: bool, pmem: bool) -> bool:
    """Whether a disk is attached as memory: shared pages of the host, no cache in the guest."""
    return read_only and pmem and features.pmem


def guest_disks(config: VmConfig, features: Features, *, pmem: bool) -> str:
    """Which device of the guest is which disk, for its kernel command line.

    Firecracker makes a disk's serial number of the file's inode, so the guest cannot know them by
    it as it does elsewhere; the order of devices is fixed instead.
    """
    names: dict[bool, list[str]] = {False: [], True: []}
    for disk in config.disks:
        as_memory = is_pmem(features, read_only=disk.read_only, pmem=pmem)
        names[as_memory].append(disk.serial)
    parts = [f"opendsec.disks={','.join(names[False])}"] if names[False] else []
    parts += [f"opendsec.pmem={','.join(names[True])}"] if names[True] else []
    return " ".join(parts)


def boot_requests(
    config: VmConfig, features: Features, rates: RateLimits, *, pmem: bool
) -> list[Request]:
    """All requests that build and start a machine, in order.

    Raises:
        SandboxStartFailed: Firecracker has no such machine.
    """
    if not 1 <= config.vcpus <= VCPUS_MAX:
        raise SandboxStartFailed(f"Firecracker offers 1 to {VCPUS_MAX} processors")
    if len(config.disks) > DISKS_MAX:
        raise SandboxStartFailed(f"more than {DISKS_MAX} disks: Firecracker has no more interrupts")
    requests: list[Request] = [
        *serial_requests(features),
        (
            "PUT",
            "/machine-config",
            {
                "vcpu_count": config.vcpus,
                "mem_size_mib": config.memory_mb,
                "smt": False,
                # So that a later save writes only what changed.
                "track_dirty_pages": True,
            },
        ),
        (
            "PUT",
            "/boot-source",
            {
                "kernel_image_path": f"/{KERNEL}",
                "initrd_path": f"/{INITRAMFS}",
                "boot_args": " ".join(
                    (config.cmdline, _QUIET_KEYBOARD, guest_disks(config, features, pmem=pmem))
                ),
            },
        ),
        *_disk_requests(config, features, rates, pmem=pmem),
        ("PUT", f"/network-interfaces/{NETWORK_ID}", _network(config, rates)),
        ("PUT", "/entropy", {}),
        ("PUT", "/balloon", _balloon(features)),
        ("PUT", "/actions", {"action_type": "InstanceStart"}),
    ]
    return requests


def serial_requests(features: Features) -> list[Request]:
    """Settings that are not part of saved devices: made before a boot and before a restore."""
    if not features.serial_rate_limit:
        return []
    bucket = {
        "size": SERIAL_BYTES_PER_S,
        "one_time_burst": SERIAL_BURST_BYTES,
        "refill_time": 1_000,
    }
    return [("PUT", "/serial", {"rate_limiter": bucket})]


def restore_request(config: VmConfig, ram: str, devices: str) -> Request:
    """Load saved memory and run."""
    return (
        "PUT",
        "/snapshot/load",
        {
            "snapshot_path": f"/{devices}",
            "mem_backend": {"backend_type": "File", "backend_path": f"/{ram}"},
            "track_dirty_pages": True,
            "resume_vm": True,
            "network_overrides": [{"iface_id": NETWORK_ID, "host_dev_name": config.tap}],
        },
    )


def _disk_requests(
    config: VmConfig, features: Features, rates: RateLimits, *, pmem: bool
) -> list[Request]:
    requests: list[Request] = []
    for disk in config.disks:
        path = f"/{disk_path(disk.serial)}"
        if is_pmem(features, read_only=disk.read_only, pmem=pmem):
            body: dict[str, Any] = {
                "id": disk.serial,
                "path_on_host": path,
                "root_device": False,
                "read_only": True,
            }
            requests.append(("PUT", f"/pmem/{disk.serial}", body))
            continue
        body = {
            "drive_id": disk.serial,
            "path_on_host": path,
            "is_root_device": False,
            "is_read_only": disk.read_only,
            # The guest's flushes end in the host's page cache: a sandbox does not outlive a crash
            # of the host as a running one, and what is paused is written out by the node.
            "cache_type": "Unsafe",
            "io_engine": "Sync",
        }
        limiter = _limiter(rates.disk_bytes, rates.disk_operations)
        if limiter and not disk.read_only:
            body["rate_limiter"] = limiter
        requests.append(("PUT", f"/drives/{disk.serial}", body))
    return requests


def _network(config: VmConfig, rates: RateLimits) -> dict[str, Any]:
    body: dict[str, Any] = {
        "iface_id": NETWORK_ID,
        "host_dev_name": config.tap,
        "guest_mac": config.guest_mac,
    }
    limiter = _limiter(rates.network_bytes, None)
    if limiter:
        body |= {"rx_rate_limiter": limiter, "tx_rate_limiter": limiter}
    return body


def _balloon(features: Features) -> dict[str, Any]:
    body: dict[str, Any] = {
        "amount_mib": 0,
        "deflate_on_oom": True,
        "stats_polling_interval_s": 0,
    }
    if features.free_page_reporting:
        body["free_page_reporting"] = True
    return body


def _limiter(bytes_per_s: int | None, operations_per_s: int | None) -> dict[str, Any]:
    limiter: dict[str, Any] = {}
    if bytes_per_s:
        limiter["bandwidth"] = {"size": bytes_per_s, "refill_time": 1_000}
    if operations_per_s:
        limiter["ops"] = {"size": operations_per_s, "refill_time": 1_000}
    return limiter
