# SPDX-License-Identifier: AGPL-3.0-only
"""A sandbox, as root, reaches neither its neighbours nor the machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from opendsec import Client, Sandbox
from tests.harness import Server, new_server

CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=2).close()
    print("open")
except OSError as exc:
    print("closed")
"""


@pytest.fixture(scope="module")
def pair(server: Server) -> Iterator[tuple[Sandbox, Sandbox]]:
    with (
        Client(base_url=server.url, api_key=server.api_key) as client,
        client.create() as one,
        client.create() as two,
    ):
        yield one, two


def own_address(sandbox: Sandbox) -> str:
    return sandbox.exec("hostname -I").stdout.split()[0]


def reaches(sandbox: Sandbox, address: str, port: int) -> bool:
    answer = sandbox.exec(["python3", "-c", CONNECT, address, str(port)], user="root")
    assert answer.stdout.strip() in ("open", "closed"), answer
    return answer.stdout.strip() == "open"


def test_not_another_sandbox(pair: tuple[Sandbox, Sandbox]) -> None:
    one, two = pair
    two.spawn("python3 -m http.server 9000 --bind 0.0.0.0")
    two.wait_for_port(9000)
    assert reaches(two, own_address(two), 9000)
    assert not reaches(one, own_address(two), 9000)
    assert not reaches(one, own_address(two), 49983)


def test_not_the_server(pair: tuple[Sandbox, Sandbox], server: Server) -> None:
    port = int(server.config.listen.rsplit(":", 1)[1])
    gateway = pair[0].exec("ip route show default | awk '{print $3}'").stdout.strip()
    for address in (gateway, "127.0.0.1", "10.211.0.1"):
        assert not reaches(pair[0], address, port)
    assert not reaches(pair[0], gateway, 22)


def test_not_the_metadata_service(pair: tuple[Sandbox, Sandbox]) -> None:
    assert not reaches(pair[0], "169.254.169.254", 80)


def test_not_the_host_as_root(pair: tuple[Sandbox, Sandbox]) -> None:
    one = pair[0]
    for command in (
        "mount -t tmpfs x /mnt",
        "mount -t proc proc /mnt",
        "nft list ruleset",
        "ip link set eth0 down",
        "mknod /tmp/sda b 8 0 && dd if=/tmp/sda of=/dev/null count=1",
        "echo 1 > /proc/sys/kernel/sysrq",
        "echo b > /proc/sysrq-trigger",
        "cat /proc/kcore | head -c 1 | grep -q .",
        "cat /proc/1/environ",
        "kill -9 1; sleep 0.2; kill -0 1 && exit 1",
        "chroot /proc/1/root true && ls /proc/1/root/../../var/lib/opendsec",
        "dmesg",
        "date -s '2001-01-01'",
        "modprobe dummy",
    ):
        answer = one.exec(["sh", "-c", command], user="root")
        assert answer.exit_code != 0, f"{command}: {answer.stdout}"
    assert one.exec("echo alive").stdout == "alive\n"


def test_grep_through_proc_and_sys_does_no_harm(pair: tuple[Sandbox, Sandbox]) -> None:
    pair[0].exec("timeout 5 grep -rs needle-that-is-nowhere /proc /sys", user="root", timeout_s=60)
    assert pair[0].exec("echo alive").stdout == "alive\n"


def test_root_is_nobody_on_the_host(pair: tuple[Sandbox, Sandbox]) -> None:
    mapping = pair[0].exec("cat /proc/self/uid_map", user="root").stdout.split()
    assert mapping[0] == "0" and int(mapping[1]) > 100_000, mapping
    other = pair[1].exec("cat /proc/self/uid_map", user="root").stdout.split()
    assert other[1] != mapping[1]


def test_the_agent_takes_orders_from_its_owner_only(pair: tuple[Sandbox, Sandbox]) -> None:
    forged = pair[0].exec(
        "curl -s -o /dev/null -w '%{http_code}' -X POST localhost:49983/init -d '{}'; echo; "
        "curl -s -o /dev/null -w '%{http_code}' -X POST localhost:49983/opendsec/terminate "
        "-d '{}'; echo; "
        "curl -s -o /dev/null -w '%{http_code}' localhost:49983/envs"
    )
    assert forged.stdout.split() == ["401", "401", "401"], forged.stdout


def test_a_foreign_key_sees_nothing(server: Server, pair: tuple[Sandbox, Sandbox]) -> None:
    sandbox_id = pair[0].sandbox_id
    for method, path in (
        ("GET", f"/v1/sandboxes/{sandbox_id}"),
        ("DELETE", f"/v1/sandboxes/{sandbox_id}"),
        ("GET", f"/sandboxes/{sandbox_id}"),
        ("DELETE", f"/sandboxes/{sandbox_id}"),
    ):
        status, _, _ = server.request(method, path, headers={"X-API-Key": "e2b_" + "1" * 40})
        assert status == 401
    routed = {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": "49983"}
    status, _, _ = server.request("GET", "/envs", headers={**routed, "X-Access-Token": "0" * 64})
    assert status == 401


def test_no_internet_means_none(server: Server) -> None:
    status, _, body = server.request(
        "POST", "/sandboxes", {"templateID": "base", "allow_internet_access": False}
    )
    assert status == 201, body
    import json

    sandbox_id = json.loads(body)["sandboxID"]
    with Client(base_url=server.url, api_key=server.api_key) as client:
        sandbox = client.connect(sandbox_id)
        assert not reaches(sandbox, "1.1.1.1", 53)
        assert sandbox.exec("getent hosts example.org", timeout_s=60).exit_code != 0
        sandbox.kill()


def test_two_instances_do_not_meet(server: Server) -> None:
    """Names, addresses and tables carry the instance: a second one is no trouble."""
    second = new_server("e2f", "10.213.0.0/16")
    try:
        second.start()
        with (
            Client(base_url=second.url, api_key=second.api_key) as client,
            client.create() as sandbox,
        ):
            assert sandbox.exec("echo two").stdout == "two\n"
    finally:
        second.purge()
    with Client(base_url=server.url, api_key=server.api_key) as client, client.create() as sandbox:
        assert sandbox.exec("echo one").stdout == "one\n"
