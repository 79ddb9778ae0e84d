# SPDX-License-Identifier: AGPL-3.0-only
"""A gateway over two real nodes in processes of their own, one by TCP, one by a Unix socket."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from bench.server import agent_pids
from opendsec import Client, NodeUnavailable, OpendsecError
from tests.harness import BIN, Server, new_server
from tests.leaks import Snapshot

SIZES = {"memory_mb": 64, "disk_mb": 256, "timeout_s": 600}


@dataclass
class Cluster:
    """Two nodes and their gateway."""

    one: Server
    two: Server
    gateway: Server

    def client(self) -> Client:
        """Of the installation's first project."""
        return Client(base_url=self.gateway.url, api_key=self.gateway.api_key, retries_max=0)


def node_port() -> int:
    """A TCP port that nothing listens on, below those that the system gives out by itself: it
    stays free until the node listens, while other tests run."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if os.geteuid() != 0:
        pytest.skip("real nodes need root")
    port = node_port()
    one = new_server(
        "flea", "10.226.0.0/17", role="node", node_listen=f"127.0.0.1:{port}", disk_pool_mb=4_096
    )
    secret = one.config.node_secret_path
    two = new_server(
        "fleb",
        "10.226.128.0/17",
        role="node",
        node_listen=f"unix:{one.root}/two.sock",
        node_secret_file=str(secret),
        disk_pool_mb=4_096,
    )
    gateway = new_server(
        "fleg",
        "10.226.0.0/17",
        role="gateway",
        node_secret_file=str(secret),
        nodes=[
            {"url": f"http://127.0.0.1:{port}", "name": "one"},
            {"url": f"unix:{one.root}/two.sock", "name": "two"},
        ],
    )
    before = [Snapshot.take(s.config.instance, (s.root,)) for s in (one, two)]
    try:
        # The first one makes the secret.
        for server in (one, two, gateway):
            server.start()
        yield Cluster(one, two, gateway)
    finally:
        for server in (gateway, two, one):
            server.purge()
    for snapshot in before:
        snapshot.assert_nothing_new()


def until(condition: Callable[[], bool], what: str, *, seconds: float = 40) -> None:
    """Wait for a condition, bounded."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.2)
    raise AssertionError(what)


def health(client: Client, name: str) -> str:
    """What the gateway says of a node."""
    return client.nodes.get(name).health


def test_sandboxes_live_on_both_nodes_and_all_that_they_do_goes_to_their_own(
    cluster: Cluster,
) -> None:
    assert cluster.one.config.node_secret_path.stat().st_mode & 0o077 == 0
    with cluster.client() as client:
        nodes = {node.name: node for node in client.nodes.list()}
        assert {name: node.health for name, node in nodes.items()} == {"one": "up", "two": "up"}
        client.nodes.set_labels("two", {"zone": "b"})
        first = client.create(**SIZES, node_labels={"zone": "b"})
        client.nodes.drain("two")
        second = client.create(**SIZES)
        assert first.info().node_id == nodes["two"].node_id
        assert second.info().node_id == nodes["one"].node_id
        with pytest.raises(OpendsecError) as refused:
            client.create(**SIZES, node_labels={"zone": "b"})
        assert (refused.value.code, refused.value.fault) == ("node_full", "capacity")
        client.nodes.undrain("two")
        for sandbox in (first, second):
            assert sandbox.exec("echo $((6 * 7))").stdout == "42\n"
            sandbox.files.write("/tmp/a", "kept")
        first.pause("filesystem")
        first.resume()
        assert first.exec("true").exit_code == 0
        # A snapshot lies on its node: what starts from it goes there.
        taken = second.snapshot(mode="filesystem")
        other = client.create(taken.snapshot_id, timeout_s=600)
        assert other.info().node_id == nodes["one"].node_id
        children = second.fork(2, mode="filesystem")
        assert {c.info().node_id for c in children} == {nodes["one"].node_id}  # type: ignore[union-attr]
        for sandbox in (first, second, other):
            assert sandbox.kill()
        client.snapshots.delete(taken.snapshot_id)
        for child in children:
            child.kill()  # type: ignore[union-attr]


def test_a_killed_node_is_no_loss(cluster: Cluster) -> None:
    """Its sandboxes run on; calls to them are refused as the platform's fault until it is back."""
    with cluster.client() as client:
        nodes = {node.name: node.node_id for node in client.nodes.list()}
        client.nodes.drain("two")
        there = client.create(**SIZES)
        client.nodes.undrain("two")
        clock = there.spawn("sleep 1000")
        cluster.one.kill_daemon()
        made = [client.create(**SIZES) for _ in range(4)]
        assert {sandbox.info().node_id for sandbox in made} == {nodes["two"]}
        until(lambda: health(client, "one") == "down", "the gateway does not see that it is gone")
        with pytest.raises(NodeUnavailable) as refused:
            there.set_timeout(600)
        assert refused.value.retryable and refused.value.fault == "platform"
        assert client.connect(made[0].sandbox_id).exec("echo on").stdout == "on\n"
        shown = cluster.gateway.request_json("GET", f"/v1/sandboxes/{there.sandbox_id}")[1]
        assert shown["state"] == "running"
        cluster.one.start()
        until(lambda: health(client, "one") == "up", "the gateway does not see that it is back")
        assert there.exec("echo again").stdout == "again\n"
        assert clock.pid in [process.pid for process in there.processes()]
        for sandbox in (there, *made):
            assert sandbox.kill()


def test_a_killed_gateway_finds_everything_again(cluster: Cluster) -> None:
    with cluster.client() as client:
        made = [client.create(**SIZES) for _ in range(3)]
        names = {sandbox.sandbox_id for sandbox in made}
    cluster.gateway.kill_daemon()
    cluster.gateway.start()
    with cluster.client() as client:
        assert {one.sandbox_id for one in client.list()} == names
        for name in names:
            sandbox = client.connect(name)
            assert sandbox.exec("echo here").stdout == "here\n"
            assert sandbox.kill()


@pytest.mark.timeout(360)
def test_nodes_keep_the_deadline_of_a_task_while_the_gateway_is_dead(cluster: Cluster) -> None:
    task_id = "ends-alone"
    with cluster.client() as client:
        until(
            lambda: {health(client, name) for name in ("one", "two")} == {"up"}, "a node is not up"
        )
        made = [client.create(**SIZES, task_id=task_id) for _ in range(2)]
        pausing = {"on_timeout": "pause", "pause_mode": "filesystem"}
        made.append(client.create(**SIZES, task_id=task_id, **pausing))
        for sandbox in made:
            sandbox.spawn("sleep 1000")
        client.tasks.set(task_id, deadline=8)
    cluster.gateway.kill_daemon()

    def left() -> list[int]:
        return [pid for node in (cluster.one, cluster.two) for pid in agent_pids(node)]

    until(lambda: not left(), "sandboxes outlive their task", seconds=90)
    cluster.gateway.start()
    with cluster.client() as client:
        assert client.tasks.wait(task_id, timeout_s=60)
        task = client.tasks.get(task_id)
        assert (task.state, task.end_reason) == ("ended", "task_deadline")
        # Those that were paused instead are ended now.
        ended = {end.reason: end.count for end in task.sandboxes.ended}
        assert sum(ended.values()) == 3 and set(ended) <= {"timeout", "task_deadline"}


def test_the_command_line_and_who_may_use_it(cluster: Cluster) -> None:
    env = {**cluster.gateway.client_environment, "OPENDSEC_API_KEY": cluster.gateway.api_key}
    env["OPENDSEC_API_URL"] = cluster.gateway.url

    def run(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [str(BIN / "opendsec"), *arguments], env=env, capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stdout + done.stderr

    assert run("node", "label", "one", "zone=a", "gpu=none") == (0, "gpu=none\nzone=a\n")
    assert run("node", "label", "one", "gpu=") == (0, "zone=a\n")
    code, listed = run("node", "ls", "--json")
    assert code == 0
    assert {node["name"]: node["labels"] for node in json.loads(listed)}["one"] == {"zone": "a"}
    code, text = run("node", "forget", "one", "--yes")
    assert code != 0 and "is not gone" in text
    code, text = run("node", "drain", "no-such-node")
    assert code != 0 and "there is no node" in text
    with cluster.client() as client:
        project = client.projects.create("below")
        gateway, key = cluster.gateway, cluster.gateway.api_key
        with (
            Client(base_url=gateway.url, api_key=key, project_id=project.project_id) as below,
            pytest.raises(OpendsecError) as refused,
        ):
            below.nodes.list()
        assert refused.value.code == "forbidden"
