# SPDX-License-Identifier: AGPL-3.0-only
"""A guest really boots: distribution kernel, our initramfs, QEMU without KVM."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec_server.binaries import find_agent
from opendsec_server.config import Config
from opendsec_server.images.base import BaseBuildError, ensure_base
from opendsec_server.images.guest import GuestBuildError, GuestImage, ensure_guest
from opendsec_server.images.store import ImageStore

from .machine import CONTROL, Machine, make_disk, make_layer, timestamp

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CACHE = os.environ.get("OPENDSEC_IMAGE_CACHE", "/var/tmp/opendsec-test-images")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guest")


@pytest.fixture(scope="module")
def config(folder: Path) -> Iterator[Config]:
    missing = [
        name
        for name in ("qemu-system-x86_64", "mkfs.erofs", "mkfs.ext4", "depmod")
        if shutil.which(name) is None
    ]
    if missing:
        pytest.skip(f"no guest is booted: {', '.join(missing)} not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENDSEC_IMAGE_CACHE", CACHE)
        yield Config(state_dir=str(folder / "state"))


@pytest.fixture(scope="module")
def guest(config: Config, folder: Path) -> GuestImage:
    try:
        return asyncio.run(ensure_guest(config, folder / "state/images", find_agent(config), print))
    except GuestBuildError as exc:
        pytest.skip(f"no guest is booted, there is no kernel to be had: {exc}")


@pytest.fixture(scope="module")
def base_layer(config: Config) -> Path:
    try:
        (layer,) = ensure_base(config, print).layers
    except BaseBuildError as exc:
        pytest.skip(f"no guest is booted, there is no base image to be had: {exc}")
    return ImageStore(config.state_path / "images").layer_path(layer)


@pytest.fixture(scope="module")
def machine(guest: GuestImage, base_layer: Path, folder: Path) -> Iterator[Machine]:
    """One machine of two layers for all tests that do it no harm."""
    top = folder / "top.erofs"
    make_layer(top, {"opt/top": "from the top\n", "etc/issue": "replaced\n"})
    make_disk(folder / "disk.ext4")
    machine = Machine(guest, folder, [top, base_layer])
    try:
        machine.boot()
        sizes = [path.stat().st_size >> 10 for path in (guest.initramfs, guest.modules_erofs)]
        assert "no watch over memory" not in machine.console
        print(f"booted in {machine.boot_s:.1f} s; initramfs {sizes[0]} KiB, modules {sizes[1]} KiB")
        assert (
            machine.init(
                machineId="0123456789abcdef0123456789abcdef",
                bootId="6dbcc4e0-5a52-4b2e-9f0a-6a0d4a3c1f11",
                entropy=base64.b64encode(os.urandom(64)).decode(),
            )
            == 204
        )
        yield machine
    finally:
        machine.kill()


def test_users_and_limits_are_those_of_a_container(machine: Machine) -> None:
    assert machine.run("id -un; sudo id -un; echo $GREETING $HOME $PWD").split() == [
        "user", "root", "hello", "/home/user", "/home/user",
    ]  # fmt: skip
    assert machine.run("ulimit -n; ulimit -Hn; ulimit -c").split() == ["16384", "1048576", "0"]
    assert machine.run("cat /proc/1/comm").strip() == "opendsec-agent"
    assert machine.run("cat /proc/1/oom_score_adj /proc/self/oom_score_adj").split() == [
        "-1000", "100",
    ]  # fmt: skip
    assert machine.run("python3 -c 'print(6 * 7)'").strip() == "42"
    assert "/dev/pts/" in machine.run("python3 -c 'import pty; pty.spawn([\"tty\"])'")


def test_layers_and_disk(machine: Machine) -> None:
    assert machine.run("cat /opt/top /etc/issue") == "from the top\nreplaced\n"
    assert machine.run("stat -f -c %T /; stat -c %a / /tmp /dev/shm /run").split() == [
        "overlayfs", "755", "1777", "1777", "755",
    ]  # fmt: skip
    size_kb, used_kb = machine.run("df -Pk / | awk 'NR==2 {print $2, $3}'").split()
    assert 900_000 < int(size_kb) < 1_048_577
    assert int(used_kb) < 50_000
    assert machine.call("POST", "/opendsec/sync")[0] == 204
    mounts = machine.run("cat /proc/mounts")
    for wanted in ("cgroup2 /sys/fs/cgroup", "proc /proc", "devpts /dev/pts", "mqueue /dev/mqueue"):
        assert wanted in mounts
    assert "/disk" not in machine.run("awk '{print $2}' /proc/mounts")
    assert machine.run("ls /modules /init /modules.list 2>/dev/null || true") == ""


def test_names(machine: Machine) -> None:
    assert machine.run("hostname; cat /etc/hostname").split() == ["itest", "itest"]
    assert "127.0.1.1\titest\n" in machine.run("cat /etc/hosts")
    assert machine.run("cat /etc/resolv.conf") == (
        "nameserver 169.254.0.1\noptions timeout:2 attempts:3\n"
    )
    assert machine.run("cat /etc/machine-id /proc/sys/kernel/random/boot_id").split() == [
        "0123456789abcdef0123456789abcdef",
        "6dbcc4e0-5a52-4b2e-9f0a-6a0d4a3c1f11",
    ]
    assert machine.run("uname -r").strip() == machine.guest.kernel_version


def test_network(machine: Machine) -> None:
    text = machine.run("ip -o addr; ip route; cat /sys/class/net/eth0/mtu")
    assert "169.254.0.21/30" in text
    assert "default via 169.254.0.22 dev eth0" in text
    assert text.endswith("1500\n")
    assert "inet6 fe80" not in text
    # A user without rights may listen anywhere.
    machine.run("python3 -c 'import socket; socket.create_server((\"\", 80))'")


def test_modules_for_containers_in_the_guest(machine: Machine) -> None:
    folder = f"/lib/modules/{machine.guest.kernel_version}"
    table = machine.run(f"cut -d: -f1 {folder}/modules.dep")
    for name in ("overlay", "br_netfilter", "nf_tables", "iptable_nat", "veth", "bridge"):
        assert f"/{name}.ko" in table
    # Without kmod in the image: a module of the tree fits the kernel.
    load = (
        "import ctypes, glob, lzma, os; "
        f"path = glob.glob('{folder}/kernel/drivers/net/dummy.ko*')[0]; "
        "raw = open(path, 'rb').read(); "
        "raw = lzma.decompress(raw) if path.endswith('.xz') else raw; "
        "libc = ctypes.CDLL(None, use_errno=True); "
        "done = libc.syscall(175, raw, ctypes.c_ulong(len(raw)), b''); "
        "assert done == 0, os.strerror(ctypes.get_errno())"
    )
    machine.run(f'sudo python3 -c "{load}"')
    assert "dummy" in machine.run("cat /proc/modules")


def guest_clock_error_s(machine: Machine, offset_s: float) -> float:
    """How far the guest's clock is off; the shortest of a few calls counts."""
    best = float("inf")
    for _ in range(5):
        before = time.time()
        then = float(machine.run("date +%s.%N")) - offset_s
        after = time.time()
        error = max(before - then, then - after, 0.0)
        best = min(best, error)
    return best


def test_clock_and_identity_after_a_restore(machine: Machine) -> None:
    assert guest_clock_error_s(machine, 0) < 0.1
    machine.run("setsid sleep 600 >/dev/null 2>&1 & sleep 0.1")
    old = socket.create_connection(("127.0.0.1", machine.port), timeout=60)
    old.sendall(b"GET /health HTTP/1.1\r\nHost: guest\r\n\r\n")
    assert old.recv(12) == b"HTTP/1.1 204"
    draw = "head -c 16 /dev/urandom | od -An -tx1"
    before = machine.run(draw)
    token = "another-control-token-0123"
    assert machine.init(restored=True, controlToken="x") == 400
    assert (
        machine.init(
            restored=True,
            controlToken=token,
            hostname="iother",
            timestamp=timestamp(86_400),
            entropy=base64.b64encode(os.urandom(64)).decode(),
            machineId=uuid.uuid4().hex,
            bootId=str(uuid.uuid4()),
        )
        == 204
    )
    try:
        # QEMU's network turns the reset into an end.
        while old.recv(4096):
            pass
    except ConnectionResetError:
        pass
    finally:
        old.close()
    assert guest_clock_error_s(machine, 86_400) < 0.1
    assert machine.run(draw) != before
    assert machine.run("hostname; cat /etc/hostname").split() == ["iother", "iother"]
    assert "127.0.1.1\tiother\n" in machine.run("cat /etc/hosts")
    assert machine.run("pgrep -c sleep").strip() == "1"
    assert machine.run("grep -c boot_id /proc/mounts").strip() == "1"
    machine.control = CONTROL
    assert machine.call("GET", "/opendsec/status")[0] == 401
    machine.control = token
    assert machine.init(restored=True, hostname="itest") == 204
    assert guest_clock_error_s(machine, 0) < 0.1


def test_the_agent_outlives_a_lack_of_memory(machine: Machine) -> None:
    hog = "python3 -c 'x = [bytearray(1 << 24) for _ in range(256)]'; echo $?"
    assert machine.run(hog).split()[-1] == "137"
    assert machine.call("GET", "/opendsec/status")[0] == 200


def test_disk_is_kept_over_a_lost_machine(machine: Machine) -> None:
    """The last test of the machine: what was synced before is there after a kill."""
    machine.run(
        "echo own > ~/file; sudo rm /opt/top; echo '10.0.0.9 mine' | sudo tee -a /etc/hosts; sync"
    )
    machine.kill()
    machine.boot()
    assert machine.init() == 204
    assert machine.run("cat ~/file") == "own\n"
    assert machine.run("ls /opt/top 2>/dev/null || echo gone").strip() == "gone"
    hosts = machine.run("cat /etc/hosts")
    assert "10.0.0.9 mine" in hosts
    assert hosts.count("itest") == 1
    # An end of the agent is the end of the machine: QEMU ends by itself.
    machine.run("sudo setsid sh -c 'sleep 1; kill -TERM 1' >/dev/null 2>&1 &")
    assert machine.wait_for_end()
    machine.process = None


def test_a_guest_that_lacks_a_disk_says_so(
    guest: GuestImage, base_layer: Path, tmp_path: Path
) -> None:
    make_disk(tmp_path / "disk.ext4", "64M")
    machine = Machine(guest, tmp_path, [base_layer], announced_layers=2, with_modules=False)
    try:
        machine.start()
        assert "opendsec-init: no disk layer1\n" in machine.wait_for_end().replace("\r", "")
    finally:
        machine.kill()


def test_disks_without_serials(guest: GuestImage, base_layer: Path, tmp_path: Path) -> None:
    """A VMM that cannot set serials names the disks in their order."""
    make_disk(tmp_path / "disk.ext4", "64M")
    machine = Machine(
        guest,
        tmp_path,
        [base_layer],
        with_modules=False,
        words="opendsec.disks=layer0,disk",
        serials=False,
    )
    try:
        machine.boot()
        assert machine.init() == 204
        assert machine.run("hostname").strip() == "itest"
    finally:
        machine.kill()
