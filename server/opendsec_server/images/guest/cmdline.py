# SPDX-License-Identifier: AGPL-3.0-only
"""The kernel command line, by which a guest learns what it is made of.

The guest's side is ``dataplane/agent/src/vm``. Nothing here differs between sandboxes of one
template, so that one saved memory serves them all: who a guest is, it hears later from ``/init``.
"""

from __future__ import annotations

from collections.abc import Sequence

GUEST_ADDRESS = "169.254.0.21"
GUEST_PREFIX = 30
GUEST_GATEWAY = "169.254.0.22"
GUEST_MAC = "02:00:a9:fe:00:15"
TAP_MAC = "02:00:a9:fe:00:16"
GUEST_DNS = "169.254.0.1"

DISK_SERIAL = "disk"
MODULES_SERIAL = "modules"


def layer_serial(index: int) -> str:
    """Serial of the disk with a read-only layer; 0 is the topmost."""
    return f"layer{index}"


def guest_cmdline(
    *,
    layers: int,
    console: str = "ttyS0",
    modules: bool = True,
    dns: Sequence[str] = (GUEST_DNS,),
    network: bool = True,
    address: str = GUEST_ADDRESS,
    prefix: int = GUEST_PREFIX,
    gateway: str = GUEST_GATEWAY,
    mac: str = GUEST_MAC,
    disks: Sequence[str] = (),
    pmem: Sequence[str] = (),
) -> str:
    """The command line of a guest, without what the VMM adds for its own devices.

    Args:
        layers: How many read-only layers it has.
        console: ``ttyS0`` or ``hvc0``.
        modules: Whether there is a disk ``modules``.
        dns: Its name servers.
        network: False: it has no network device.
        address: Its address.
        prefix: Bits of the network part.
        gateway: Its way out.
        mac: Hardware address of its network device.
        disks: Names of the virtio disks in the order in which the VMM attaches them, for a VMM
            that cannot give them serials (Firecracker). Empty: they have serials.
        pmem: The same for persistent memory devices.
    """
    words = [
        f"console={console}",
        "quiet",
        "panic=-1",
        "reboot=t",
        "opendsec.vm=1",
        f"opendsec.layers={layers}",
    ]
    if modules:
        words.append("opendsec.modules=1")
    if network:
        words += [
            f"opendsec.ip={address}/{prefix}",
            f"opendsec.gw={gateway}",
            f"opendsec.mac={mac}",
        ]
    if dns:
        words.append(f"opendsec.dns={','.join(dns)}")
    if disks:
        words.append(f"opendsec.disks={','.join(disks)}")
    if pmem:
        words.append(f"opendsec.pmem={','.join(pmem)}")
    return " ".join(words)
