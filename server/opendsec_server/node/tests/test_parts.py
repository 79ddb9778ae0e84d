# SPDX-License-Identifier: AGPL-3.0-only
"""The node's parts that need no machine."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import time
from pathlib import Path

import pytest

from opendsec_server.config import ConfigError
from opendsec_server.contract.errors import InvalidRequest, NodeFull
from opendsec_server.contract.node import NetworkPolicy
from opendsec_server.contract.signatures import file_signature
from opendsec_server.contract.states import EndReason, State
from opendsec_server.node import metrics, process
from opendsec_server.node.agent_path import install_agent
from opendsec_server.node.backends.container import why_ended
from opendsec_server.node.cgroups import detect
from opendsec_server.node.cgroups.v1 import CgroupV1
from opendsec_server.node.cgroups.v2 import CgroupV2
from opendsec_server.node.container import seccomp
from opendsec_server.node.container.bundle import HostTraits, oci_config
from opendsec_server.node.deadlines import Deadlines
from opendsec_server.node.hooks.base import tear_down
from opendsec_server.node.journal import Record
from opendsec_server.node.network import dns, hosttable, policy
from opendsec_server.node.network.slots import SlotPool
from opendsec_server.node.sandbox import Sandbox, placeholder
from opendsec_server.node.tests.machine import small_spec

# --- network ----------------------------------------------------------------


def test_policy_refuses_what_is_no_network() -> None:
    for entry in ("example.com", "10.0.0.0/33", "::1", "", "1.2.3.4; drop", "1.2.3.4/8 }"):
        with pytest.raises(InvalidRequest):
            policy.policy_commands(NetworkPolicy(allow=(entry,)))


def test_policy_collapses_overlaps() -> None:
    commands = policy.policy_commands(
        NetworkPolicy(allow=("10.0.0.0/8", "10.1.2.3", "10.1.0.0/16"))
    )
    assert "add element inet sandbox allowed { 10.0.0.0/8 }" in commands


def test_metadata_addresses_are_closed_before_what_allow_names() -> None:
    inside = policy.base_ruleset("10.0.0.0/16")
    outside = hosttable.ruleset("x", "10.0.0.0/16", ("1.1.1.1",))
    for address in policy.METADATA:
        assert address in inside.partition("meta nfproto ipv4 jump egress")[0]
        assert address in outside


def test_resolvers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub, real = tmp_path / "stub", tmp_path / "real"
    monkeypatch.setattr(dns, "RESOLV_CONF", stub)
    monkeypatch.setattr(dns, "SYSTEMD_RESOLV_CONF", real)
    assert dns.host_resolvers(()) == ()
    stub.write_text("# x\nnameserver 127.0.0.53\noptions edns0\n")
    assert dns.host_resolvers(()) == ("127.0.0.53",)
    real.write_text("nameserver 10.0.0.2\nnameserver fe80::1%eth0\nnameserver 10.0.0.3\n")
    assert dns.host_resolvers(()) == ("10.0.0.2", "10.0.0.3")
    stub.write_text("nameserver 192.0.2.1\n")
    assert dns.host_resolvers(()) == ("192.0.2.1",)
    assert dns.host_resolvers(("8.8.8.8",)) == ("8.8.8.8",)
    assert hosttable.need_route_localnet(("127.0.0.1",))
    assert not hosttable.need_route_localnet(("10.0.0.1",))


def test_slot_numbers_rest_and_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pool = SlotPool("od", "10.0.0.0/29", ready_wanted=0, capacity=99, user_namespaces=False)
    assert pool.capacity == 6
    assert [pool._take_number() for _ in range(3)] == [1, 2, 3]
    pool.free_number(2)
    assert pool._take_number() == 4, "a freed number rests first"
    now[0] += 5
    assert pool._take_number() == 2
    assert [pool._take_number() for _ in range(2)] == [5, 6]
    with pytest.raises(NodeFull):
        pool._take_number()
    pool.free_number(6)
    assert pool._take_number() == 6, "better tired than none"
    assert pool.address_of(6) == "10.0.0.6"
    assert pool.link_of(6) == "od-6"


# --- container --------------------------------------------------------------


def traits(bpf: str | None = None) -> HostTraits:
    return HostTraits(Path("/agent"), True, "/opendsec-od", 20_000, bpf)


def test_oci_config() -> None:
    spec = small_spec(cpu=0.5, memory_mb=100)
    config = oci_config(spec, traits(), netns_path="/proc/1/fd/9", id_base=0x7001_0000)
    linux = config["linux"]
    assert linux["resources"]["memory"] == {"limit": 100 << 20, "swap": 100 << 20}
    assert linux["resources"]["cpu"] == {"quota": 50_000, "period": 100_000, "shares": 512}
    assert {"type": "network", "path": "/proc/1/fd/9"} in linux["namespaces"]
    assert linux["uidMappings"] == [{"containerID": 0, "hostID": 0x7001_0000, "size": 65_536}]
    assert linux["seccomp"]["defaultAction"] == "SCMP_ACT_ERRNO"
    assert "CAP_SYS_ADMIN" not in config["process"]["capabilities"]["bounding"]
    assert all(value not in str(config) for value in (spec.access_token, spec.control_token))


def test_oci_config_without_user_namespace_hides_more() -> None:
    with_ids = oci_config(small_spec(), traits(), netns_path="/n", id_base=1)
    without = oci_config(small_spec(), traits(), netns_path="/n", id_base=None)
    assert "uidMappings" not in without["linux"]
    assert set(with_ids["linux"]["maskedPaths"]) < set(without["linux"]["maskedPaths"])


def test_seccomp_profile_compiles_and_is_consistent() -> None:
    program = base64.b64decode(seccomp.compiled())
    assert len(program) % 8 == 0
    assert len(program) // 8 > 100
    config = oci_config(small_spec(), traits(seccomp.compiled()), netns_path="/n", id_base=1)
    assert "seccomp" not in config["linux"]
    rules = seccomp.profile()["syscalls"]
    allowed = {n for r in rules if r["action"] == "SCMP_ACT_ALLOW" for n in r["names"]}
    denied = {n for r in rules if r["action"] == "SCMP_ACT_ERRNO" for n in r["names"]}
    assert not allowed & denied
    assert {"mount", "bpf", "keyctl", "unshare", "setns", "userfaultfd", "kexec_load"} <= denied
    assert not {"io_uring_setup", "clone3"} & (allowed | denied), "these answer ENOSYS"
    assert {"ptrace", "read", "openat2"} <= allowed


# --- control groups ---------------------------------------------------------

V2 = "25 1 0:22 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1 = "".join(
    f"{n} 1 0:{n} / /sys rw - cgroup cgroup rw,{c}\n"
    for n, c in enumerate(("memory", "cpu,cpuacct", "pids", "name=systemd"))
)


def test_cgroup_versions() -> None:
    assert detect("/o", V2).kind == "v2"
    assert detect("/o", V1).kind == "v1"
    assert detect("/o", V1 + V2).kind == "hybrid"
    with pytest.raises(ConfigError):
        detect("/o", "1 1 0:1 / / rw - ext4 /dev/sda rw\n")


def test_cgroup_v2_readings(tmp_path: Path) -> None:
    groups = CgroupV2("/od", tmp_path)
    assert groups.usage("i1") is None
    directory = tmp_path / "od" / "i1"
    directory.mkdir(parents=True)
    for name, text in {
        "cpu.stat": "usage_usec 5000\nuser_usec 1\n",
        "memory.current": "3000\n",
        "memory.stat": "anon 1\nfile 1000\n",
        "memory.events": "oom 2\noom_kill 1\n",
        "cgroup.procs": "",
    }.items():
        (directory / name).write_text(text)
    usage = groups.usage("i1")
    assert usage is not None
    assert (usage.cpu_us, usage.memory_bytes, usage.cache_bytes) == (5_000, 2_000, 1_000)
    assert groups.oom_kills("i1") == 1
    assert groups.known() == {"i1"}
    groups.kill("i1")
    assert (directory / "cgroup.kill").read_text() == "1"


def test_cgroup_v1_readings(tmp_path: Path) -> None:
    memory, cpu = tmp_path / "memory", tmp_path / "cpuacct"
    groups = CgroupV1("/od", {"memory": memory, "cpuacct": cpu}, hybrid=False)
    for base in (memory, cpu):
        (base / "od" / "i1").mkdir(parents=True)
    (cpu / "od/i1/cpuacct.usage").write_text("5000000\n")
    (memory / "od/i1/memory.usage_in_bytes").write_text("3000\n")
    (memory / "od/i1/memory.stat").write_text("cache 1\ntotal_cache 1000\n")
    (memory / "od/i1/memory.oom_control").write_text("oom_kill_disable 0\noom_kill 4\n")
    usage = groups.usage("i1")
    assert usage is not None
    assert (usage.cpu_us, usage.memory_bytes, usage.cache_bytes) == (5_000, 2_000, 1_000)
    assert groups.oom_kills("i1") == 4


# --- time, processes, hooks -------------------------------------------------


async def test_deadlines_fire_in_order_and_once() -> None:
    fired: list[str] = []
    deadlines = Deadlines(fired.append)
    now = time.time()
    deadlines.set("late", now + 0.10)
    deadlines.set("moved", now + 0.01)
    deadlines.set("moved", now + 0.05)
    deadlines.set("past", now - 100)
    deadlines.set("cleared", now + 0.02)
    deadlines.clear("cleared")
    for _ in range(200):
        await asyncio.sleep(0.01)
        if "late" in fired:
            break
    assert fired == ["past", "moved", "late"]
    deadlines.stop()


async def test_run_program(tmp_path: Path) -> None:
    done = await process.run(["sh", "-c", "echo out; echo err >&2; exit 3"], timeout_s=10)
    assert (done.code, done.output) == (3, "out\nerr")
    assert (await process.run(["sh", "-c", "kill -9 $$"], timeout_s=10)).code == -9
    log = tmp_path / "log"
    log.write_text("before\n")
    assert (await process.run(["echo", "x"], timeout_s=10, output_path=log)).output == "x"
    assert log.read_text() == "before\nx\n"
    with pytest.raises(process.ProgramTimeout):
        await process.run(["sleep", "60"], timeout_s=0.05)
    with pytest.raises(FileNotFoundError):
        await process.run(["no-such-program-here"], timeout_s=1)


async def test_cancelled_program_is_gone(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    task = asyncio.create_task(
        process.run(["sh", "-c", f"echo $$ > {mark}; sleep 60"], timeout_s=60)
    )
    while not (mark.exists() and mark.read_text().strip()):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert process.start_ticks_of(int(mark.read_text())) is None


def test_process_identity() -> None:
    ticks = process.start_ticks_of(os.getpid())
    assert ticks is not None
    boot = process.boot_id()
    assert process.is_alive(process.ProcessIdentity(os.getpid(), ticks, boot), boot)
    assert not process.is_alive(process.ProcessIdentity(os.getpid(), ticks + 1, boot), boot)
    assert not process.is_alive(process.ProcessIdentity(os.getpid(), ticks, "other"), boot)


def test_signal_to_a_gone_process_is_nothing() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    pidfd = os.pidfd_open(pid)
    while not process.has_ended(pidfd):
        time.sleep(0.005)
    assert process.reap(pidfd) == 0
    process.send_signal(pidfd, signal.SIGKILL)
    assert process.reap(pidfd) is None
    os.close(pidfd)


class _Step:
    def __init__(self, name: str, order: list[str], *, fails: bool = False) -> None:
        self.name = name
        self._order = order
        self._fails = fails

    async def setup(self, box: Sandbox) -> None:
        raise AssertionError

    async def teardown(self, box: Sandbox) -> None:
        self._order.append(self.name)
        if self._fails:
            raise RuntimeError(self.name)


async def test_every_teardown_runs() -> None:
    order: list[str] = []
    steps = [_Step("a", order), _Step("b", order, fails=True), _Step("c", order, fails=True)]
    failures = await tear_down(steps, placeholder("itest0000000000000000"))
    assert order == ["c", "b", "a"]
    assert [name for name, _error in failures] == ["c", "b"]


# --- the rest ---------------------------------------------------------------


def test_signature_is_e2bs() -> None:
    """The example was recorded on the wire; see the E2B notes."""
    made = file_signature("/home/user/a", "read", "", "envdtok", None)
    assert made == "v1_8RXODqNeADarD9vmCEFJbwl7o5g1JnXdtHUz5upb32w"


def test_metrics_ring_keeps_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_KEPT_MAX", 4)
    ring = metrics._Ring()
    for n in range(7):
        ring.add(metrics._SAMPLE.pack(float(n), 0.0, n, 0, 0))
        assert [s[0] for s in ring.samples()] == [float(i) for i in range(max(0, n - 3), n + 1)]
    assert len(ring.data) == 4 * 24


def test_the_agent_is_copied_by_content(tmp_path: Path) -> None:
    binary = tmp_path / "agent"
    binary.write_bytes(b"one")
    run = tmp_path / "run"
    run.mkdir()
    first = install_agent(binary, run)
    assert first.stat().st_mode & 0o777 == 0o755
    assert install_agent(binary, run) == first
    binary.write_bytes(b"two")
    second = install_agent(binary, run)
    assert [p.name for p in run.iterdir()] == [second.name]


@pytest.mark.parametrize(
    ("kills", "code", "reason", "words"),
    [
        (1, -9, EndReason.OOM, "limit of 256 MiB"),
        (1, None, EndReason.OOM, "256 MiB"),
        (1, 3, EndReason.EXITED, "status 3"),
        (0, -9, EndReason.EXITED, "signal 9"),
        (0, None, EndReason.EXITED, "ended"),
    ],
)
def test_why_it_ended(
    tmp_path: Path, kills: int, code: int | None, reason: EndReason, words: str
) -> None:
    box = Sandbox(Record(spec=small_spec(), state=State.RUNNING, end_at=0.0), exit_code=code)
    directory = tmp_path / "od" / box.sandbox_id
    directory.mkdir(parents=True)
    (directory / "memory.events").write_text(f"oom_kill {kills}\n")
    found, message = why_ended(CgroupV2("/od", tmp_path), box)
    assert found is reason
    assert words in message
