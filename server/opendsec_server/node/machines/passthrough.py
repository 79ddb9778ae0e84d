# SPDX-License-Identifier: AGPL-3.0-only
"""Devices of the host that a full virtual machine is given (PCI passthrough by VFIO).

A device is given only with its whole IOMMU group: members of a group can reach each other's memory
past the IOMMU, so a group must never be split between a guest and anybody else.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from opendsec_server.contract import limits
from opendsec_server.contract.errors import InvalidRequest, NodeFull, NotSupported

DRIVER = "vfio-pci"
SYSFS_PCI = Path("/sys/bus/pci/devices")
VFIO_DIR = Path("/dev/vfio")

_ADDRESS_RE = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")
_BRIDGE_CLASS = "0x0604"


@dataclass(frozen=True, slots=True)
class HostDevice:
    """One device that a machine is given.

    Attributes:
        address: Its PCI address.
        group: Number of its IOMMU group.
    """

    address: str
    group: int

    @property
    def group_node(self) -> Path:
        """The character device by which its group is opened."""
        return VFIO_DIR / str(self.group)


def check_addresses(addresses: Sequence[str]) -> None:
    """Whether these are addresses at all.

    Raises:
        InvalidRequest: too many, one is malformed, or named twice.
    """
    if len(addresses) > limits.VM_DEVICES_MAX:
        raise InvalidRequest(f"vm.devices: at most {limits.VM_DEVICES_MAX}")
    for address in addresses:
        if _ADDRESS_RE.fullmatch(address) is None:
            raise InvalidRequest(
                f"vm.devices: `{address[:32]}` is no PCI address such as `0000:65:00.0`"
            )
    if len(set(addresses)) != len(addresses):
        raise InvalidRequest("vm.devices: a device is named twice")


def host_devices(
    addresses: Sequence[str],
    *,
    allowed: Collection[str],
    in_use: Collection[str],
    sysfs: Path = SYSFS_PCI,
) -> list[HostDevice]:
    """The devices that may be given to a machine.

    Args:
        addresses: What is asked for, checked by ``check_addresses``.
        allowed: The node's ``passthrough_devices``.
        in_use: What other machines have.
        sysfs: ``/sys/bus/pci/devices``.

    Raises:
        NotSupported: not allowed, not there, no IOMMU, or not bound to ``vfio-pci``; the message
            says what to do.
        InvalidRequest: an IOMMU group would be split.
        NodeFull: another machine has it.
    """
    found = []
    for address in addresses:
        if address not in allowed:
            raise NotSupported(
                f"device {address} is not one that this node gives away",
                remediation="The operator lists such devices in `passthrough_devices`.",
            )
        if address in in_use:
            raise NodeFull(f"device {address} belongs to another sandbox", retry_after_s=60)
        found.append(_look(sysfs / address))
    for device in found:
        others = _endpoints_of_group(sysfs / device.address) - set(addresses)
        if others:
            raise InvalidRequest(
                f"vm.devices: {device.address} shares IOMMU group {device.group} with "
                f"{', '.join(sorted(others))}; a group can only be given whole",
                remediation="Name these devices too.",
            )
    return found


def _look(device: Path) -> HostDevice:
    if not device.exists():
        raise NotSupported(f"there is no PCI device {device.name} on this node")
    group = _link_name(device / "iommu_group")
    if group is None:
        raise NotSupported(
            f"device {device.name} has no IOMMU group: the machine's IOMMU is off",
            remediation="Switch VT-d or AMD-Vi on in the firmware, and boot with "
            "intel_iommu=on or amd_iommu=on.",
        )
    _check_driver(device)
    return HostDevice(device.name, int(group))


def _check_driver(device: Path) -> None:
    driver = _link_name(device / "driver")
    if driver != DRIVER:
        raise NotSupported(
            f"device {device.name} is bound to {driver or 'no driver'}, not to {DRIVER}",
            remediation=f"driverctl set-override {device.name} {DRIVER}",
        )


def _endpoints_of_group(device: Path) -> set[str]:
    """Bridges stay the host's; everything else in a group must be given away together."""
    members = set()
    for member in (device / "iommu_group" / "devices").iterdir():
        kind = (member / "class").read_text().strip()
        if not kind.startswith(_BRIDGE_CLASS):
            members.add(member.name)
    return members


def _link_name(link: Path) -> str | None:
    try:
        return link.readlink().name
    except OSError:
        return None
