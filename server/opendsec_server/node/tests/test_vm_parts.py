# SPDX-License-Identifier: AGPL-3.0-only
"""Parts of full virtual machines that need no machine: seed, firmware, passthrough."""

from __future__ import annotations

import email
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from opendsec_server.contract.errors import InvalidRequest, NodeFull, NotSupported
from opendsec_server.node.machines import seed
from opendsec_server.node.machines.firmware import find_uefi
from opendsec_server.node.machines.passthrough import check_addresses, host_devices

GPU, AUDIO, BRIDGE, NIC = "0000:65:00.0", "0000:65:00.1", "0000:64:00.0", "0000:66:00.0"


def parts_of(text: str) -> list[tuple[str, str]]:
    """Type and content of every part that is no container, as cloud-init walks them."""
    found = []
    for part in email.message_from_string(text).walk():
        if part.is_multipart():
            continue
        payload = part.get_payload(decode=True)
        assert isinstance(payload, bytes)
        found.append((part.get_content_type(), payload.decode()))
    return found


def test_user_data_of_the_caller_is_a_part_of_its_own() -> None:
    theirs = "#cloud-config\nruncmd: [[echo, 'grüße']]\n"
    ours, given = parts_of(seed.joined_user_data(theirs))
    assert ours[0] == "text/cloud-boothook"
    assert ours[1].startswith("#cloud-boothook\n#!/bin/sh\n")
    # cloud-init tells the kind of a plain part by its beginning.
    assert given == ("text/plain", theirs)


def test_user_data_in_several_parts_stays_so() -> None:
    theirs = (
        'Content-Type: multipart/mixed; boundary="XX"\nMIME-Version: 1.0\n\n'
        "--XX\nContent-Type: text/cloud-config\n\n#cloud-config\na: 1\n"
        "--XX\nContent-Type: text/x-shellscript\n\n#!/bin/sh\ntrue\n--XX--\n"
    )
    kinds = [kind for kind, _text in parts_of(seed.joined_user_data(theirs))]
    assert kinds == ["text/cloud-boothook", "text/cloud-config", "text/x-shellscript"]


def test_no_user_data() -> None:
    assert [kind for kind, _ in parts_of(seed.joined_user_data(None))] == ["text/cloud-boothook"]


async def test_seed_image(tmp_path: Path) -> None:
    if shutil.which("xorriso") is None:
        pytest.skip("xorriso is not installed")
    agent = tmp_path / "agent"
    agent.write_bytes(b"\x7fELF agent")
    pem = "-----BEGIN CERTIFICATE-----\nMA==\n-----END CERTIFICATE-----"
    content = seed.SeedContent(
        instance_id="i1", hostname="i1", user_data=None, agent=agent, authorities=[pem]
    )
    image = tmp_path / "seed.iso"
    await seed.make_seed(content, image)
    await seed.make_seed(content, image)
    assert image.stat().st_size == seed.SEED_MB << 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent", "seed.iso"]

    def read(name: str) -> bytes:
        out = tmp_path / "out"
        out.unlink(missing_ok=True)
        subprocess.run(
            ["xorriso", "-osirrox", "on", "-indev", image, "-extract", f"/{name}", out],
            check=True,
            capture_output=True,
        )
        return out.read_bytes()

    label = subprocess.run(
        ["xorriso", "-indev", image, "-pvd_info"], check=True, capture_output=True, text=True
    ).stdout
    assert "cidata" in label
    assert json.loads(read("meta-data")) == {"instance-id": "i1", "local-hostname": "i1"}
    network = json.loads(read("network-config"))["ethernets"]["eth0"]
    assert network["addresses"] == ["169.254.0.21/30"]
    assert network["match"] == {"macaddress": "02:00:a9:fe:00:15"}
    assert read("opendsec-agent") == agent.read_bytes()
    assert read("guest_service.sh").startswith(b"#!/bin/sh")
    assert read("opendsec-node-000.crt").decode() == pem + "\n"


def test_the_guests_script_is_a_script() -> None:
    subprocess.run(["sh", "-n", seed.SERVICE], check=True)


def test_uefi_firmware_is_found_as_a_pair(tmp_path: Path) -> None:
    with pytest.raises(NotSupported) as caught:
        find_uefi(str(tmp_path))
    assert "ovmf" in caught.value.remediation
    (tmp_path / "OVMF_CODE_4M.fd").touch()
    (tmp_path / "OVMF_VARS.fd").touch()
    with pytest.raises(NotSupported):
        find_uefi(str(tmp_path))
    (tmp_path / "OVMF_VARS_4M.fd").touch()
    assert find_uefi(str(tmp_path)).variables.name == "OVMF_VARS_4M.fd"


class Host:
    """A machine's PCI devices, as sysfs shows them."""

    def __init__(self, root: Path) -> None:
        self.devices = root / "devices"
        self._groups = root / "groups"
        self._drivers = root / "drivers"
        self.devices.mkdir()

    def add(
        self, address: str, group: int | None, driver: str = "vfio-pci", kind: str = "0x030000"
    ) -> None:
        device = self.devices / address
        device.mkdir()
        (device / "class").write_text(kind + "\n")
        (self._drivers / driver).mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(self._drivers / driver)
        if group is not None:
            members = self._groups / str(group) / "devices"
            members.mkdir(parents=True, exist_ok=True)
            (device / "iommu_group").symlink_to(members.parent)
            (members / address).symlink_to(device)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A graphics card with its sound device behind a bridge, all in one group, and a NIC."""
    host = Host(tmp_path)
    host.add(BRIDGE, 7, "pcieport", "0x060400")
    host.add(GPU, 7)
    host.add(AUDIO, 7, kind="0x040300")
    host.add(NIC, 9, "igb", "0x020000")
    return host


EVERYTHING = (GPU, AUDIO, NIC)


def test_a_whole_group_is_given(host: Host) -> None:
    found = host_devices([GPU, AUDIO], allowed=EVERYTHING, in_use=(), sysfs=host.devices)
    assert [(device.address, device.group) for device in found] == [(GPU, 7), (AUDIO, 7)]
    assert found[0].group_node == Path("/dev/vfio/7")


def test_a_group_is_not_split(host: Host) -> None:
    with pytest.raises(InvalidRequest) as caught:
        host_devices([GPU], allowed=EVERYTHING, in_use=(), sysfs=host.devices)
    assert AUDIO in caught.value.message
    assert BRIDGE not in caught.value.message


def test_why_devices_are_refused(host: Host) -> None:
    def ask(*addresses: str, allowed: tuple[str, ...] = EVERYTHING) -> None:
        host_devices(addresses, allowed=allowed, in_use=(), sysfs=host.devices)

    with pytest.raises(NotSupported, match="not one that this node gives away"):
        ask(GPU, AUDIO, allowed=(GPU,))
    with pytest.raises(NotSupported, match="bound to igb"):
        ask(NIC)
    with pytest.raises(NotSupported, match="no PCI device"):
        ask("0000:99:00.0", allowed=("0000:99:00.0",))
    host.add("0000:01:00.0", None)
    with pytest.raises(NotSupported, match="IOMMU is off"):
        ask("0000:01:00.0", allowed=("0000:01:00.0",))


def test_a_device_belongs_to_one_machine(host: Host) -> None:
    with pytest.raises(NodeFull):
        host_devices([GPU, AUDIO], allowed=EVERYTHING, in_use={AUDIO}, sysfs=host.devices)


@pytest.mark.parametrize(
    "wrong", [["65:00.0"], ["0000:65:00.8"], [GPU, GPU], ["../../x"], [GPU.upper() + " "]]
)
def test_what_is_no_address(wrong: list[str]) -> None:
    with pytest.raises(InvalidRequest):
        check_addresses(wrong)
