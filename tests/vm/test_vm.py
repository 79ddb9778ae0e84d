# SPDX-License-Identifier: AGPL-3.0-only
"""Full virtual machines, from the image to the screen. In the order of the file: they share one
machine, and the last of its tests restart it."""

from __future__ import annotations

import json
import os
import struct
import time

import pytest

from opendsec import Client, ConnectionFailed, OpendsecError, Sandbox
from tests.harness import Server

from .conftest import START_TIMEOUT_S, Maker
from .websocket import Refused, WebSocket

pytestmark = pytest.mark.skipif(
    "OPENDSEC_TEST_VM" not in os.environ,
    reason="full machines boot for minutes where they are emulated; set OPENDSEC_TEST_VM=1",
)

CONSOLE_S = 120
BOOT_S = 600


def out(sandbox: Sandbox, command: str) -> str:
    """What a command prints; it must succeed."""
    result = sandbox.exec(command, timeout_s=120)
    assert result.exit_code == 0, f"{command}: {result.stdout}{result.stderr}"
    return result.stdout.strip()


def look(server: Server, sandbox_id: str, kind: str, **headers: str) -> WebSocket:
    """Open its console or screen."""
    path = f"/v1/sandboxes/{sandbox_id}/{kind}"
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return WebSocket(server.config.listen, path, given, CONSOLE_S)


def token_of(server: Server, sandbox_id: str) -> str:
    """Its access token."""
    _status, answer = server.request_json("GET", f"/v1/sandboxes/{sandbox_id}")
    return str(answer["access_token"])


def picture(server: Server, sandbox_id: str) -> bytes:
    """The screen's pixels, by RFB (RFC 6143)."""
    protocol = f"binary, opendsec.token.{token_of(server, sandbox_id)}"
    with look(server, sandbox_id, "vnc", Sec_WebSocket_Protocol=protocol) as screen:
        version = screen.read(12)
        assert version.startswith(b"RFB ")
        screen.send(version)
        screen.read(screen.read(1)[0])
        screen.send(b"\x01")
        assert screen.read(4) == b"\0\0\0\0"
        screen.send(b"\x01")
        width, height = struct.unpack(">HH", screen.read(4))
        screen.read(16)
        (length,) = struct.unpack(">I", screen.read(4))
        screen.read(length)
        screen.send(struct.pack(">BBHHHH", 3, 0, 0, 0, width, height))
        pixels = b""
        kind, _, rectangles = struct.unpack(">BBH", screen.read(4))
        assert kind == 0
        for _ in range(rectangles):
            _x, _y, wide, high, encoding = struct.unpack(">HHHHi", screen.read(12))
            assert encoding == 0
            pixels += screen.read(wide * high * 4)
        return pixels


def test_it_is_a_machine_with_the_agent_as_a_service(machine: Sandbox) -> None:
    assert out(machine, "id -un; sudo -n id -un; hostname") == f"user\nroot\n{machine.sandbox_id}"
    assert out(machine, "cat /proc/1/comm; systemctl is-active opendsec-agent") == "systemd\nactive"
    machine.files.write("/home/user/a", b"\0\1\2")
    assert machine.files.read("/home/user/a") == b"\0\1\2"


def test_the_callers_user_data_and_ours_both_work(machine: Sandbox) -> None:
    assert out(machine, "cat /etc/from-user-data") == "yes"
    out(machine, "cloud-init status --wait >/dev/null; test -e /run/user-data-ran")


def test_disks(machine: Sandbox) -> None:
    listing = json.loads(out(machine, "lsblk --json --bytes --nodeps -o SERIAL,SIZE,RO"))
    disks = {d["serial"]: (d["size"], d["ro"]) for d in listing["blockdevices"] if d["serial"]}
    assert disks["disk"] == (10_240 << 20, False)
    assert disks["seed"][1] is True
    assert disks["data1"] == (64 << 20, False)
    assert disks["data2"] == (2_048 << 20, False)


def test_network_clock_and_certificates(machine: Sandbox) -> None:
    assert "169.254.0.21/30" in out(machine, "ip -brief address show eth0")
    assert abs(float(out(machine, "date +%s.%N")) - time.time()) < 5
    assert out(machine, "cat /etc/machine-id") != ""


def test_console(server: Server, machine: Sandbox) -> None:
    token = token_of(server, machine.sandbox_id)
    for headers in ({}, {"X_Access_Token": token[::-1]}):
        with pytest.raises(Refused, match=r"401.*unauthenticated"):
            look(server, machine.sandbox_id, "console", **headers)
    with look(server, machine.sandbox_id, "console", X_Access_Token=token) as console:
        console.send(b"\n")
        console.until(b"login: ", CONSOLE_S)
        with pytest.raises(Refused, match=r"409.*console_in_use"):
            look(server, machine.sandbox_id, "console", X_Access_Token=token)
        console.send(b"root\n")
        console.until(b"# ", CONSOLE_S)
        console.send(b"echo $((6 * 7))things\n")
        console.until(b"42things", CONSOLE_S)
        console.send(b"exit\n")
    _status, answer = server.request_json("GET", f"/v1/sandboxes/{machine.sandbox_id}/console")
    assert "42things" in answer["text"]


def test_screen(server: Server, machine: Sandbox) -> None:
    out(machine, "echo on the screen | sudo tee /dev/tty1")
    assert len(set(picture(server, machine.sandbox_id))) > 1


def test_pause_keeps_memory_disks_and_screen(server: Server, machine: Sandbox) -> None:
    boot_id = out(machine, "cat /proc/sys/kernel/random/boot_id")
    out(machine, "echo kept > /dev/shm/note; echo kept | sudo dd of=/dev/vdc conv=fsync")
    before = picture(server, machine.sandbox_id)
    for _ in range(3):
        machine.pause()
        machine.resume()
        assert out(machine, "cat /dev/shm/note; sudo head -c 4 /dev/vdc") == "kept\nkept"
    assert out(machine, "cat /proc/sys/kernel/random/boot_id") == boot_id
    assert abs(float(out(machine, "date +%s.%N")) - time.time()) < 5
    after = picture(server, machine.sandbox_id)
    # The cursor blinks.
    assert sum(a != b for a, b in zip(before, after, strict=True)) < len(before) // 100


def test_forks_have_memory_and_an_identity_of_their_own(client: Client, machine: Sandbox) -> None:
    facts = (
        "hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id; "
        "head -c 16 /dev/urandom | od -An -tx1"
    )
    children = [child for child in machine.fork(2) if isinstance(child, Sandbox)]
    assert len(children) == 2
    try:
        seen = [out(sandbox, facts).splitlines() for sandbox in (machine, *children)]
        for same in zip(*seen, strict=True):
            assert len(set(same)) == 3, seen
        for child, (hostname, *_rest) in zip(children, seen[1:], strict=True):
            assert hostname == child.sandbox_id
            assert out(child, "cat /dev/shm/note; sudo head -c 4 /dev/vdc") == "kept\nkept"
    finally:
        for child in children:
            child.kill()


def test_a_guest_that_restarts_itself_is_the_same_sandbox(machine: Sandbox) -> None:
    """After a restore: firmware and tables must still be there for it."""
    boot_id = out(machine, "cat /proc/sys/kernel/random/boot_id")
    out(machine, "sudo systemctl --no-block reboot")
    deadline = time.monotonic() + BOOT_S
    while True:
        assert time.monotonic() < deadline, "it did not come up again"
        try:
            result = machine.exec("cat /proc/sys/kernel/random/boot_id; cat /dev/shm/note")
        except (OpendsecError, ConnectionFailed):
            time.sleep(1)
            continue
        if result.stdout.splitlines()[0] != boot_id:
            break
        time.sleep(1)
    assert len(result.stdout.splitlines()) == 1
    assert out(machine, "hostname; cat /etc/from-user-data") == f"{machine.sandbox_id}\nyes"


def test_uefi_and_a_disk_saved_without_memory(server: Server, make: Maker) -> None:
    machine = make("cloud-uefi")
    out(machine, "test -d /sys/firmware/efi && echo here > /home/user/note && sync")
    machine.pause(mode="filesystem")
    machine.kill()


@pytest.mark.skipif(
    "OPENDSEC_TEST_DIRECT_BOOT" not in os.environ,
    reason="one more boot of a minute; set OPENDSEC_TEST_DIRECT_BOOT=1 to run it",
)
def test_direct_boot(make: Maker) -> None:
    machine = make("cloud-direct")
    assert "root=LABEL=cloudroot" in out(machine, "cat /proc/cmdline")
    machine.kill()


REFUSALS = [
    ("cloud", {"disk_mb": 1_024}, 400, "too few"),
    ("cloud", {"vm": {"disks": [{}]}}, 400, "size_mb"),
    ("cloud", {"vm": {"disks": [{"image": "none"}]}}, 404, "no disk image"),
    ("cloud", {"vm": {"firmware": "direct"}}, 400, "without a kernel"),
    ("cloud", {"vm": {"user_data": "hello"}}, 400, "cloud-init does not take this"),
    ("cloud", {"vm": {"devices": ["65:00.0"]}}, 400, "no PCI address"),
    ("cloud", {"vm": {"devices": ["0000:00:02.0"]}}, 501, "not one that this node gives away"),
    ("base", {"vm": {}, "backend": "container"}, 501, "is not for sandboxes"),
    ("cloud", {"backend": "container"}, 400, "cannot start it"),
]


@pytest.mark.parametrize(("template", "fields", "status", "says"), REFUSALS)
def test_what_is_refused(
    server: Server, template: str, fields: dict[str, object], status: int, says: str
) -> None:
    got, answer = server.request_json(
        "POST", "/v1/sandboxes", {"template": template, "memory_mb": 512, **fields},
        timeout_s=START_TIMEOUT_S,
    )  # fmt: skip
    assert says in answer["error"]["message"], answer
    assert got == status, answer


def test_images_are_templates(server: Server) -> None:
    listed = server.opendsecd("image", "list").stdout
    assert [line.split()[0] for line in listed.splitlines()] == [
        "cloud",
        "cloud-direct",
        "cloud-uefi",
    ]
    refused = server.opendsecd("image", "import", "base", "/dev/null", check=False)
    assert refused.returncode == 78
