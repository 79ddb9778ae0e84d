# SPDX-License-Identifier: AGPL-3.0-only
"""Network."""

from __future__ import annotations

import pytest

from bench.server import agent_route
from opendsec import NetworkPolicy, Sandbox

from . import outside as far
from .kit import Bench, Maker, serve, until
from .outside import Outside

CONNECT = 'timeout 5 bash -c "exec 3<>/dev/tcp/$0/$1" 2>/dev/null && echo open || echo closed'
RESOLVE = f"timeout 20 getent ahostsv4 {far.NAME}"


@pytest.fixture(scope="module")
def world(bench: Bench, outside: Outside | None) -> Outside:
    bench.own_machine()
    assert outside is not None
    return outside


def reaches(sandbox: Sandbox, address: str, port: int = far.PORT) -> bool:
    """Tried as root: it must not help."""
    answer = sandbox.exec(["bash", "-c", CONNECT, address, str(port)], user="root")
    assert answer.stdout.strip() in ("open", "closed"), answer
    return answer.stdout.strip() == "open"


def test_a_port_on_loopback_is_reachable_from_outside(sandbox: Sandbox) -> None:
    serve(sandbox, 8123)
    with sandbox.http(8123) as web:
        assert web.get("/index.html").text == "from inside"


def test_a_port_on_ipv6_loopback_is_reachable_from_outside(sandbox: Sandbox) -> None:
    serve(sandbox, 8124, "::1")
    with sandbox.http(8124) as web:
        assert web.get("/index.html").text == "from inside"


def test_a_closed_port_is_said_to_be_closed(sandbox: Sandbox) -> None:
    with sandbox.http(9) as web:
        answer = web.get("/")
    assert answer.status_code == 502
    assert "not open" in answer.json()["message"]


def test_private_ports_need_the_traffic_token(make: Maker) -> None:
    closed = make(network=NetworkPolicy(allow_public_traffic=False))
    serve(closed, 8125)
    with closed.http(8125) as web:
        assert web.get("/index.html").status_code == 200
        headers = {"E2b-Traffic-Access-Token": "0" * 64}
        assert web.get("/index.html", headers=headers).status_code == 403


def test_the_internet_is_open_and_private_ranges_are_not(sandbox: Sandbox, world: Outside) -> None:
    assert reaches(sandbox, far.PUBLIC)
    assert not reaches(sandbox, far.PRIVATE)
    assert not reaches(sandbox, far.METADATA)


def test_names_are_resolved(sandbox: Sandbox, world: Outside) -> None:
    answer = sandbox.exec(RESOLVE)
    assert far.ANSWER in answer.stdout, answer


def test_no_internet_means_none_and_no_dns(make: Maker, world: Outside) -> None:
    shut = make(network=NetworkPolicy(internet=False))
    assert not reaches(shut, far.PUBLIC)
    assert shut.exec(RESOLVE).exit_code != 0


def test_allow_opens_and_beats_deny(make: Maker, world: Outside) -> None:
    some = make(network=NetworkPolicy(internet=False, allow=(far.PRIVATE,)))
    assert reaches(some, far.PRIVATE)
    assert not reaches(some, far.PUBLIC)


def test_rules_change_while_it_runs(make: Maker, world: Outside) -> None:
    one = make()
    assert reaches(one, far.PUBLIC)
    one.set_network(NetworkPolicy(deny=("198.51.100.0/24",)))
    assert not reaches(one, far.PUBLIC)
    one.set_network(NetworkPolicy(deny=("198.51.100.0/24",), allow=(far.PUBLIC,)))
    assert reaches(one, far.PUBLIC)


def test_metadata_stays_closed_even_if_allowed(make: Maker, world: Outside) -> None:
    asking = make(network=NetworkPolicy(allow=("169.254.0.0/16",)))
    assert not reaches(asking, far.METADATA)


def test_rules_hold_after_a_pause(make: Maker, world: Outside) -> None:
    one = make(network=NetworkPolicy(deny=("198.51.100.0/24",)))
    for mode in ("full", "filesystem"):
        one.pause(mode)
        one.resume()
        assert not reaches(one, far.PUBLIC), mode
        assert far.ANSWER in one.exec(RESOLVE).stdout, mode


def test_other_sandboxes_are_not_reachable(sandbox: Sandbox, bench: Bench, make: Maker) -> None:
    other = make()
    address = agent_route(bench.own_machine(), other.sandbox_id)["address"]
    serve(other, 9000, "0.0.0.0")
    assert not reaches(sandbox, address, 9000)
    assert not reaches(sandbox, address, 49983)
    asking = make(network=NetworkPolicy(allow=(f"{address}/32",)))
    assert not reaches(asking, address, 9000), "not even if its rules say so"


def test_the_node_is_not_reachable(sandbox: Sandbox, bench: Bench, world: Outside) -> None:
    port = int(bench.own_machine().config.listen.rsplit(":", 1)[1])
    gateway = sandbox.exec("ip route show default").stdout.split()[2]
    for address in (gateway, far.HOST_END, "169.254.0.1"):
        assert not reaches(sandbox, address, port), address
        assert not reaches(sandbox, address, 22), address


def test_the_agent_takes_orders_from_its_owner_only(sandbox: Sandbox) -> None:
    forged = sandbox.exec(
        "for r in init opendsec/terminate opendsec/sync; do curl -s -o /dev/null "
        "-w '%{http_code} ' -X POST localhost:49983/$r -d '{}'; done; "
        "curl -s -o /dev/null -w '%{http_code}' localhost:49983/envs"
    )
    assert forged.stdout.split() == ["401"] * 4, forged.stdout


def test_hostname_is_the_sandbox_id_and_resolves(sandbox: Sandbox) -> None:
    names = sandbox.exec("hostname; cat /etc/hostname; getent hosts $(hostname) | wc -l")
    assert names.stdout.split() == [sandbox.sandbox_id, sandbox.sandbox_id, "1"]


def test_a_connection_outward_stays_open(sandbox: Sandbox, world: Outside) -> None:
    talk = (
        "import socket,time\n"
        f"s=socket.create_connection(('{far.PUBLIC}',{far.PORT}),timeout=10)\n"
        "f=s.makefile('rw')\n"
        "for i in range(5):\n"
        "    f.write(f'line {i}\\n'); f.flush(); assert f.readline()==f'echo line {i}\\n'\n"
        "    time.sleep(0.1)\n"
        "print('ok')"
    )
    assert sandbox.exec(["python3", "-ISc", talk]).stdout == "ok\n"


def test_root_cannot_lift_the_rules(make: Maker, world: Outside) -> None:
    one = make(network=NetworkPolicy(deny=("198.51.100.0/24",)))
    one.exec("nft flush ruleset; iptables -F; ip route add 198.51.100.0/24 dev eth0", user="root")
    assert not reaches(one, far.PUBLIC)
    until(lambda: one.exec("true").exit_code == 0, "it is not reachable any more")
