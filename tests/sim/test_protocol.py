# SPDX-License-Identifier: AGPL-3.0-only
"""The node protocol over HTTP: it says what the contract says, and trusts nobody."""

from __future__ import annotations

import asyncio
import inspect
import io
import ssl
import subprocess
import tarfile
import time
from pathlib import Path

import msgspec
import pytest

from opendsec_server.contract import node_wire as wire
from opendsec_server.contract.errors import (
    AlreadyPaused,
    InvalidRequest,
    NodeFull,
    NodeUnavailable,
    SandboxNotFound,
    StateConflict,
    all_error_classes,
)
from opendsec_server.contract.ids import new_sandbox_id
from opendsec_server.contract.images import ImageConfig, NodeImages
from opendsec_server.contract.node import NodeClient, SandboxSpec
from opendsec_server.contract.node_proof import Prover
from opendsec_server.contract.states import EndReason, State
from opendsec_server.control.nodes import Fleet, NodeNotReached
from opendsec_server.control.nodes.http_client import HttpImages, HttpNode
from opendsec_server.control.nodes.images import FleetImages
from opendsec_server.control.tests.fake_node import FakeNode
from opendsec_server.daemon.listening import Tls, bind_tcp, listening
from opendsec_server.node.serving import NodeApp

from .conftest import until
from .serve import SECRET, SimApp, serving
from .simulated import SimNode


def spec_of(node_id: str) -> SandboxSpec:
    """A small container on a node."""
    now = time.time()
    return SandboxSpec(
        sandbox_id=new_sandbox_id(node_id),
        project_id="p",
        template_id="t",
        image="base",
        cpu=1.0,
        memory_mb=64,
        disk_mb=64,
        env={"ü": "\x00 is not allowed, but ☃ is"},
        created_at=now,
        end_at=now + 300,
        access_token="a",
        traffic_token="t",
        control_token="c",
    )


@pytest.mark.parametrize(
    ("protocol", "classes"),
    [(NodeClient, (Fleet, HttpNode)), (NodeImages, (FleetImages, HttpImages))],
)
def test_every_method_of_the_contract_is_there_with_the_same_parameters(
    protocol: type, classes: tuple[type, ...]
) -> None:
    """A method that is added to the contract must be added to those that hand it on."""
    methods = {n for n, m in vars(protocol).items() if inspect.isfunction(m) and n[0] != "_"}
    assert methods
    for cls in classes:
        for name in methods:
            wanted = inspect.signature(getattr(protocol, name)).parameters
            found = inspect.signature(getattr(cls, name)).parameters
            assert list(found) == list(wanted), f"{cls.__name__}.{name}"


def test_every_error_arrives_as_itself() -> None:
    for cls in all_error_classes():
        sent = cls("why", remediation="what to do", details={"a": 1}, retry_after_s=3)
        raw = msgspec.json.encode(wire.Failure(error=wire.to_wire(sent)))
        got = wire.from_wire(wire.decode_failure(raw).error)
        assert type(got) is cls
        assert got.to_dict() == sent.to_dict()
        assert got.retry_after_s == 3


@pytest.fixture
def fake() -> FakeNode:
    return FakeNode(microvm="kvm")


async def test_a_life_of_a_sandbox(fake: FakeNode, tmp_path: Path) -> None:
    """The contract's behaviour, by way of HTTP, against the same fake that stands for it in the
    control plane's own tests."""
    async with serving([fake], tmp_path) as urls:  # type: ignore[list-item]
        node = HttpNode(urls[0], SECRET)
        info = await node.info()
        assert info == await fake.info()
        spec = spec_of(info.node_id)
        events = node.events()
        first = asyncio.create_task(anext(events))
        await asyncio.sleep(0.1)
        name = spec.sandbox_id
        one, other = await asyncio.gather(node.create(spec), node.create(spec))
        assert one == other == await fake.get(name)
        assert fake.specs[name] == spec
        assert fake.created == 1
        assert (await first).state is State.STARTING
        assert (await anext(events)).state is State.RUNNING
        assert [s.sandbox_id for s in await node.list()] == [name]
        kinds = [e async for e in node.exec(name, ("sh", "-c", "echo hi"), timeout_s=5)]
        assert kinds[-1].kind == "end"
        assert kinds == [e async for e in fake.exec(name, ("sh", "-c", "echo hi"), timeout_s=5)]
        report = await node.pause(name)
        assert report.status.state is State.PAUSED
        with pytest.raises(AlreadyPaused):
            await node.pause(name)
        with pytest.raises(StateConflict) as conflict:
            await node.route(name)
        assert conflict.value.details["state"] == "paused"
        assert (await node.resume(name, end_at=time.time() + 60)).state is State.RUNNING
        taken = await node.snapshot(name, "s" * 20, mode="filesystem")
        assert await node.snapshots() == [taken]
        assert await node.delete_snapshot("s" * 20) is True
        assert await node.delete_snapshot("s" * 20) is False
        marked = await node.set_marks(labels={"zone": "a"}, draining=True)
        assert (marked.labels, marked.draining) == ({"zone": "a"}, True)
        fake.images.offered["app"] = ({}, ImageConfig(user="app"), None)
        pulled = await node.images.pull("app", refresh=False)
        assert await node.images.get(pulled.digest) == pulled
        ended = await node.kill(name, EndReason.IDLE)
        assert (ended.state, ended.reason) == (State.ENDED, EndReason.IDLE)
        with pytest.raises(SandboxNotFound):
            await node.get("i" + "x" * 19)
        await events.aclose()  # type: ignore[attr-defined]
        await node.close()


async def test_files_go_over_with_the_call_that_unpacks_them(
    fake: FakeNode, tmp_path: Path
) -> None:
    archive = tmp_path / "files.tar"
    with tarfile.open(archive, "w") as tar:
        content = b"x" * 3_000_000
        member = tarfile.TarInfo("dir/big")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    async with serving([fake], tmp_path) as urls:  # type: ignore[list-item]
        node = HttpNode(urls[0], SECRET)
        spec = spec_of((await node.info()).node_id)
        await node.create(spec)
        where = {"sources": ["dir"], "target": "/to", "user": "root", "mode": None}
        await node.unpack(spec.sandbox_id, str(archive), **where)  # type: ignore[arg-type]
        assert len(fake.contents[spec.sandbox_id].disk["/to/big"]) == 3_000_000
        archive.write_bytes(b"no archive")
        with pytest.raises(InvalidRequest, match="damaged"):
            await node.unpack(spec.sandbox_id, str(archive), **where)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="cannot be read"):
            await node.unpack(spec.sandbox_id, "/no/such/file", **where)  # type: ignore[arg-type]
        # The node drops its copy once the answer has gone out.
        await until(lambda: not list(tmp_path.glob("unpack-*")))
        await node.close()


async def test_many_creates_in_one_request_each_have_their_own_end(tmp_path: Path) -> None:
    async with serving([SimNode("saaa", sandboxes_max=150)], tmp_path) as urls:
        node = HttpNode(urls[0], SECRET)
        specs = [spec_of("saaa") for _ in range(200)]
        got = await asyncio.gather(*map(node.create, specs), return_exceptions=True)
        made = [status.sandbox_id for status in got if not isinstance(status, BaseException)]
        assert made == [spec.sandbox_id for spec in specs[:150]]
        assert all(isinstance(failure, NodeFull) for failure in got[150:])
        await node.close()


async def test_who_does_not_hold_the_secret_gets_nothing(tmp_path: Path) -> None:
    sim = SimNode("saaa")
    async with serving([sim], tmp_path) as urls:
        wrong = HttpNode(urls[0], b"another secret that is also long enough")
        with pytest.raises(NodeUnavailable, match="secret"):
            await wrong.info()
        with pytest.raises(NodeUnavailable, match="secret"):
            await wrong.create(spec_of("saaa"))
        assert not sim.kept
        await wrong.close()


async def test_a_stranger_at_the_nodes_address_is_not_believed(tmp_path: Path) -> None:
    """It answers well, but cannot prove that it holds the secret."""

    async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n{"ok":true}')
        await writer.drain()
        writer.close()

    path = tmp_path / "stranger.sock"
    async with await asyncio.start_unix_server(stranger, str(path)):
        node = HttpNode(f"unix:{path}", SECRET)
        with pytest.raises(NodeUnavailable, match="does not hold"):
            await node.delete_snapshot("s")
        await node.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"no HTTP at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nxyz",
        b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nxyz\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_whatever_comes_back_is_a_platform_error(tmp_path: Path, answer: bytes) -> None:
    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        nonce = head.partition(f"{wire.AUTH_HEADER}: ")[2].partition(".")[0]
        proof = Prover(SECRET).answer(nonce).encode()
        first, _, rest = answer.partition(b"\r\n")
        if rest:
            writer.write(first + b"\r\n" + wire.PROOF_HEADER.encode() + b": " + proof + b"\r\n")
        writer.write(rest or answer)
        await writer.drain()
        writer.close()

    path = tmp_path / "broken.sock"
    async with await asyncio.start_unix_server(broken, str(path)):
        node = HttpNode(f"unix:{path}", SECRET)
        # It has met its node before.
        node._connections.node_id = "saaa"
        for work in (node.info(), node.create(spec_of("saaa")), node.pause("i" + "x" * 19)):
            with pytest.raises(NodeUnavailable) as failed:
                await work
            assert not isinstance(failed.value, NodeNotReached)
            assert failed.value.retryable
        await node.close()


async def test_nobody_there_is_told_apart_from_an_answer_that_was_lost(tmp_path: Path) -> None:
    """Only of the first is it certain that nothing has begun."""
    sim = SimNode("saaa")
    async with serving([sim], tmp_path) as urls:
        node = HttpNode(urls[0], SECRET)
        await node.info()
        sim.faults.drop_answers = True
        spec = spec_of("saaa")
        with pytest.raises(NodeUnavailable) as lost:
            await node.create(spec)
        assert not isinstance(lost.value, NodeNotReached)
        sim.faults.drop_answers = False
        assert (await node.get(spec.sandbox_id)).state is State.RUNNING
    with pytest.raises(NodeUnavailable):
        await node.info()
    with pytest.raises(NodeNotReached):
        await node.info()
    await node.close()


async def test_bad_requests_are_answered_and_harm_nothing(tmp_path: Path) -> None:
    """From one who holds the secret: another release, or a defect."""
    async with serving([SimNode("saaa")], tmp_path) as urls:
        node = HttpNode(urls[0], SECRET)
        await node.info()
        connections = node._connections
        for name, body in (
            ("get", b"{}"),
            ("get", b"not json"),
            ("get", b'{"sandbox_id": 5}'),
            ("no-such-call", b"{}"),
            ("__class__", b"{}"),
            ("images.__init__", b"{}"),
            (wire.CREATES, b'[{"sandbox_id": "i"}]'),
            (wire.CREATES, b"[" + b",".join([wire.encode(spec_of("saaa"))] * 300) + b"]"),
            (wire.EXEC, b"{}"),
            (wire.UNPACK, b"junk"),
        ):
            async with connections.exchange(name, body) as connection:
                answer = [line async for line in connections.lines(connection)]
            failure = wire.decode_failure(answer[0]).error
            assert failure.kind in ("InvalidRequest", "NotFound", "PayloadTooLarge"), name
        assert (await node.info()).node_id == "saaa"
        await node.close()


async def test_a_long_answer_is_waited_for_while_the_node_shows_that_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Less than the answer takes.
    monkeypatch.setattr(wire, "SILENCE_S_MAX", 1.5)
    sim = SimNode("saaa")
    async with serving([sim], tmp_path) as urls:
        node = HttpNode(urls[0], SECRET)
        spec = spec_of("saaa")
        await node.create(spec)
        program = node.exec(spec.sandbox_id, ("sleep", "2"), timeout_s=9)
        assert [event.kind async for event in program] == ["stdout", "end"]
        sim.faults.dead = True
        with pytest.raises(NodeUnavailable, match="nothing was heard"):
            await node.get(spec.sandbox_id)
        await node.close()


def test_the_simulation_is_served_by_the_nodes_own_application(tmp_path: Path) -> None:
    app = SimApp(SimNode("saaa"), tmp_path).app
    assert type(app).__module__ == "opendsec_server.node.serving.app"


async def test_over_tls_a_gateway_trusts_only_the_certificates_it_was_given(
    tmp_path: Path,
) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=node",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    sim = SimNode("saaa")
    app = NodeApp(sim, sim.node_id, SECRET, tmp_path)  # type: ignore[arg-type]
    door = bind_tcp("127.0.0.1", 0)
    url = f"https://127.0.0.1:{door.getsockname()[1]}"
    async with listening(app, door, Tls(str(cert), str(key))):
        trusting = HttpNode(url, SECRET, ssl.create_default_context(cafile=str(cert)))
        assert (await trusting.info()).node_id == "saaa"
        spec = spec_of("saaa")
        await trusting.create(spec)
        program = trusting.exec(spec.sandbox_id, ("echo", "x"), timeout_s=5)
        assert [event.kind async for event in program] == ["stdout", "end"]
        stranger = HttpNode(url, SECRET)
        with pytest.raises(NodeNotReached, match="certificate"):
            await stranger.info()
        plain = HttpNode(url.replace("https", "http"), SECRET)
        with pytest.raises(NodeUnavailable):
            await plain.info()
        for node in (trusting, stranger, plain):
            await node.close()
        app.close()
