# SPDX-License-Identifier: AGPL-3.0-only
"""A real node: what it promises to the control plane."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import os
import shutil
import signal
import sqlite3
import time
from pathlib import Path

import pytest

from opendsec_server.contract.ids import new_sandbox_id
from opendsec_server.node.tests.conftest import MakeNode
from opendsec_server.node.tests.machine import CallError, NodeProcess, first_process, small_spec

pytestmark = pytest.mark.node


async def refused(node: NodeProcess, name: str, *args: object, **kwargs: object) -> str:
    """The code of the error that a call ends with."""
    with pytest.raises(CallError) as caught:
        await node.call(name, *args, **kwargs)
    return caught.value.code


async def test_life_of_a_sandbox(node: NodeProcess) -> None:
    spec = await node.create(env={"GREETING": "hello"})
    assert await node.state(spec.sandbox_id) == "running"
    assert [s["sandbox_id"] for s in await node.call("list")] == [spec.sandbox_id]

    code, output = await node.exec(spec, "echo $GREETING; id -un; hostname; exit 3")
    assert code == 3
    assert output.split() == ["hello", "user", spec.sandbox_id]

    status = await node.call("kill", spec.sandbox_id)
    assert (status["state"], status["reason"]) == ("ended", "killed")
    assert await node.call("list") == []
    moves = [(t["source"], t["target"]) for t in await node.call("transitions", spec.sandbox_id)]
    assert moves == [
        ("pending", "starting"),
        ("starting", "running"),
        ("running", "stopping"),
        ("stopping", "ended"),
    ]
    events = [e["state"] for e in await node.call("events")]
    assert events == ["starting", "running", "stopping", "ended"]


async def test_create_is_idempotent_by_id(node: NodeProcess) -> None:
    spec = small_spec()
    both = await asyncio.gather(node.call("create", spec), node.call("create", spec))
    assert both[0] == both[1]
    assert await node.call("create", spec) == both[0]
    assert len(await node.call("list")) == 1
    await node.call("kill", spec.sandbox_id)
    assert (await node.call("create", spec))["state"] == "ended"


async def test_unknown_sandbox(node: NodeProcess) -> None:
    unknown = new_sandbox_id("test")
    for call in ("get", "kill", "route", "transitions"):
        assert await refused(node, call, unknown) == "sandbox_not_found"
    assert await refused(node, "set_end_at", unknown, time.time()) == "sandbox_not_found"


async def test_kill_twice_and_use_after(node: NodeProcess) -> None:
    spec = await node.create()
    first, second = await asyncio.gather(
        node.call("kill", spec.sandbox_id), node.call("kill", spec.sandbox_id)
    )
    assert first == second
    assert await node.call("kill", spec.sandbox_id) == first
    assert await refused(node, "route", spec.sandbox_id) == "sandbox_not_found"


async def test_kill_while_starting(node: NodeProcess) -> None:
    specs = [small_spec() for _ in range(12)]
    creates = [asyncio.create_task(node.call("create", spec)) for spec in specs]
    await asyncio.sleep(0.05)
    killed = await asyncio.gather(*(node.call("kill", s.sandbox_id) for s in specs))
    assert {k["state"] for k in killed} == {"ended"}
    results = await asyncio.gather(*creates, return_exceptions=True)
    assert all(
        isinstance(r, dict) or (isinstance(r, CallError) and r.code == "sandbox_state_conflict")
        for r in results
    )
    assert any(isinstance(r, CallError) for r in results)
    assert await node.call("list") == []


async def test_end_time(node: NodeProcess) -> None:
    short = await node.create(end_at=time.time() + 1.5)
    status = await node.wait_state(short.sandbox_id, "ended")
    assert status["reason"] == "timeout"
    assert status["ended_at"] >= short.end_at

    long = await node.create()
    kept = await node.call("set_end_at", long.sandbox_id, time.time() + 1, only_extend=True)
    assert kept["end_at"] == long.end_at
    await node.call("set_end_at", long.sandbox_id, 0.0)
    assert (await node.wait_state(long.sandbox_id, "ended"))["reason"] == "timeout"


async def test_a_locked_journal_does_not_keep_sandboxes_alive(node: NodeProcess) -> None:
    due = await node.create(end_at=time.time() + 2)
    killed = await node.create()
    first = first_process(node.config, due.sandbox_id)
    with contextlib.closing(
        sqlite3.connect(Path(node.config.state_dir) / "node.db", isolation_level=None)
    ) as other:
        other.execute("BEGIN IMMEDIATE")
        assert await refused(node, "create", small_spec()) == "node_unavailable"
        assert (await node.exec(killed, "true"))[0] == 0
        assert await refused(node, "kill", killed.sandbox_id) == "node_unavailable"
        for sandbox_id in (due.sandbox_id, killed.sandbox_id):
            with pytest.raises(AssertionError, match="no process"):
                first_process(node.config, sandbox_id)
        assert not Path(f"/proc/{first}").exists()
        other.execute("ROLLBACK")
    assert (await node.wait_state(due.sandbox_id, "ended"))["reason"] == "timeout"
    assert (await node.wait_state(killed.sandbox_id, "ended"))["reason"] == "killed"
    assert await node.call("list") == []


async def test_idle_time(node: NodeProcess) -> None:
    idle = await node.create(idle_timeout_s=1)
    used = await node.create(idle_timeout_s=6)
    for _ in range(16):  # longer than its idle time, and pauses far shorter than it
        await asyncio.sleep(0.5)
        assert (await node.exec(used, "true"))[0] == 0
    assert (await node.call("get", idle.sandbox_id))["reason"] == "idle"
    assert (await node.wait_state(used.sandbox_id, "ended"))["reason"] == "idle"


async def test_first_process_ends(node: NodeProcess) -> None:
    spec = await node.create()
    os.kill(first_process(node.config, spec.sandbox_id), signal.SIGKILL)
    status = await node.wait_state(spec.sandbox_id, "ended")
    assert status["reason"] == "exited"
    assert "signal 9" in status["message"]


async def test_memory_limit(node: NodeProcess) -> None:
    """The greedy process dies; the sandbox and its agent live."""
    spec = await node.create(memory_mb=128)
    code, _ = await node.exec(spec, "python3 -c 'x = bytearray(400 << 20); print(len(x))'")
    assert code != 0
    assert (await node.exec(spec, "echo alive"))[1] == "alive\n"
    sample = (await node.call("metrics", spec.sandbox_id, 0, time.time() + 60))[-1]
    assert sample["memory_total_bytes"] == 128 << 20
    assert 0 < sample["memory_used_bytes"] < 128 << 20


THREAD_BOMB = """
import threading
stop = threading.Event()
count = 0
try:
    while count < 10_000:
        threading.Thread(target=stop.wait).start()
        count += 1
except RuntimeError:
    print("stopped at", count)
stop.set()
"""


async def test_process_limit(node: NodeProcess) -> None:
    """The limit holds, and the agent still answers."""
    spec = await node.create(memory_mb=1024)
    code, output = await node.exec(spec, f"python3 -c '{THREAD_BOMB}'")
    assert code == 0, output
    assert 3_000 < int(output.split()[-1]) <= 4_096
    assert (await node.exec(spec, "echo alive"))[1] == "alive\n"


async def test_disk_limit(node: NodeProcess) -> None:
    spec = await node.create(disk_mb=64)
    code, output = await node.exec(spec, "dd if=/dev/zero of=$HOME/big bs=1M count=200")
    assert code != 0
    assert "quota exceeded" in output
    other = await node.create(disk_mb=64)
    assert (await node.exec(other, "dd if=/dev/zero of=$HOME/ok bs=1M count=20"))[0] == 0


async def test_inside_is_held(node: NodeProcess) -> None:
    """Root in the sandbox is nobody on the host, and the usual ways out are shut."""
    spec = await node.create()
    pid = first_process(node.config, spec.sandbox_id)
    assert os.stat(f"/proc/{pid}").st_uid >= 0x7000_0000
    shut = (
        "mount -t tmpfs x /mnt",
        "unshare -U true",
        "unshare -m true",
        "ip link add x type dummy",
        "ip addr add 10.9.9.9/32 dev eth0",
        "mknod /tmp/disk b 8 0",
        "echo 1 > /proc/sys/kernel/panic",
        "echo b > /proc/sysrq-trigger",
        "cat /proc/kcore",
        "dmesg",
        "umount /.opendsec/opendsec-agent",
        "date -s 2001-01-01",
        "cat /proc/1/environ",
        "python3 -c 'import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)'",
        "python3 -c 'import socket; socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)'",
        "kill -9 1; sleep 0.1; false",
    )
    for command in shut:
        code, output = await node.exec(spec, f"( {command} ) 2>&1", user="root")
        # A masked file reads as empty.
        assert code != 0 or (command == "cat /proc/kcore" and output == ""), (command, output)
    assert await node.state(spec.sandbox_id) == "running"


async def test_tools_inside_work(node: NodeProcess) -> None:
    spec = await node.create()
    works = (
        "sudo -n true",
        "sudo chown nobody /tmp && sudo chmod 1777 /tmp",
        "sudo su -c true",
        "python3 -m venv --without-pip /tmp/v",
        "git init -q /tmp/g",
        "node -e 'process.exit(0)'",
        "test $(ulimit -n) -ge 1024",
        "test -w /dev/shm",
        "python3 -c 'import multiprocessing as m; m.Lock()'",
        "test $(cat /proc/self/oom_score_adj) -ge 0",
        "sudo python3 -c 'import socket; socket.socket().bind((\"\", 80))'",
        "python3 -c 'import socket; socket.socket(socket.AF_INET6).bind((\"::1\", 0))'",
        "locale -a | grep -qi c.utf",
        "grep -q nameserver /etc/resolv.conf",
        "strace -V >/dev/null 2>&1 || true",
    )
    for command in works:
        code, output = await node.exec(spec, f"( {command} ) 2>&1")
        assert code == 0, (command, output)


async def test_full_node(make_node: MakeNode) -> None:
    node = make_node(sandboxes_max=2)
    await node.start()
    await node.create()
    second = await node.create()
    assert await refused(node, "create", small_spec()) == "node_full"
    await node.call("kill", second.sandbox_id)
    await node.create()


async def test_unknown_image_and_backend(node: NodeProcess) -> None:
    assert await refused(node, "create", small_spec(image="nowhere")) == "template_not_found"
    assert await refused(node, "create", small_spec(backend="fncall")) == "not_supported"
    assert await node.call("list") == []


async def test_runtime_missing(make_node: MakeNode, scratch: Path) -> None:
    absent = make_node(oci_runtime="/nowhere/crun")
    await absent.start()
    assert absent.config_error is not None
    assert "crun" in absent.config_error

    copy = scratch / "crun"
    shutil.copy(shutil.which("crun") or "", copy)
    node = make_node(oci_runtime=str(copy))
    await node.start()
    copy.unlink()
    spec = small_spec()
    assert await refused(node, "create", spec) == "sandbox_start_failed"
    status = await node.call("get", spec.sandbox_id)
    assert (status["state"], status["reason"]) == ("failed", "start_failed")
    assert await refused(node, "create", spec) == "sandbox_start_failed"


async def test_other_runtime(make_node: MakeNode) -> None:
    if shutil.which("runc") is None:
        pytest.skip("runc is not installed")
    node = make_node(oci_runtime="runc")
    await node.start()
    spec = await node.create()
    assert (await node.exec(spec, "echo hello"))[1] == "hello\n"
    assert (await node.exec(spec, "unshare -U true", user="root"))[0] != 0


async def test_without_user_namespaces(make_node: MakeNode) -> None:
    node = make_node(user_namespaces="off")
    await node.start()
    spec = await node.create()
    assert (await node.exec(spec, "sudo id -u"))[1] == "0\n"
    assert (await node.call("info"))["features"]["user_namespaces"] is False


async def test_signed_route(node: NodeProcess) -> None:
    spec = await node.create()
    text = f"/home/user/a:read::{spec.access_token}:99"
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
    asked = {
        "path": "/home/user/a",
        "operation": "read",
        "username": "",
        "signature": f"v1_{digest}",
        "expiration": "99",
    }
    assert (await node.call("route_by_signature", **asked))["sandbox_id"] == spec.sandbox_id
    asked["operation"] = "write"
    assert await refused(node, "route_by_signature", **asked) == "sandbox_not_found"


async def test_burst(node: NodeProcess) -> None:
    """More at once than slots, turns and cores."""
    specs = [small_spec() for _ in range(40)]
    await asyncio.gather(*(node.call("create", spec) for spec in specs))
    routes = await asyncio.gather(*(node.call("route", s.sandbox_id) for s in specs))
    assert len({r["address"] for r in routes}) == 40
    await asyncio.gather(*(node.call("kill", s.sandbox_id) for s in specs))
    assert await node.call("list") == []
    info = await node.call("info")
    assert info["sandboxes"] == 0
    assert info["features"]["teardowns_unfinished"] == 0
