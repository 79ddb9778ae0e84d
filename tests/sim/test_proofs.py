# SPDX-License-Identifier: AGPL-3.0-only
"""Someone sits on the line between gateway and node, sees everything, and changes or repeats it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import io
import re
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from opendsec_server.contract import node_wire as wire
from opendsec_server.contract.errors import (
    InvalidRequest,
    NodeClocksDiffer,
    NodeUnavailable,
    OpendsecError,
)
from opendsec_server.contract.node import SandboxSpec
from opendsec_server.contract.node_proof import Prover, digest_of
from opendsec_server.control.nodes import NodeNotReached
from opendsec_server.control.nodes.http_client import HttpNode
from opendsec_server.control.tests.fake_node import FakeNode
from opendsec_server.node.serving import memory

from .serve import SECRET, serving
from .simulated import SimNode
from .test_protocol import spec_of

Change = Callable[[bytes], bytes]


def as_it_is(data: bytes) -> bytes:
    """No change."""
    return data


class Line:
    """Hands on what gateway and node say, as it is told to."""

    def __init__(self, path: Path, node: str) -> None:
        self.url = f"unix:{path}"
        self.to_node: Change = as_it_is
        self.to_gateway: Change = as_it_is
        self.said: list[bytes] = []
        """What the gateway said on each connection, as it was."""
        self._node = node.removeprefix("unix:")
        self._serving: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        number = len(self.said)
        self.said.append(b"")
        node_reader, node_writer = await asyncio.open_unix_connection(self._node)

        async def upwards() -> None:
            while data := await reader.read(1 << 20):
                self.said[number] += data
                node_writer.write(self.to_node(data))
                await node_writer.drain()

        async def downwards() -> None:
            while data := await node_reader.read(1 << 20):
                writer.write(self.to_gateway(data))
                await writer.drain()

        ways = {asyncio.create_task(upwards()), asyncio.create_task(downwards())}
        try:
            # Who goes away ends both.
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in (node_writer, writer):
                end.close()
                with contextlib.suppress(OSError):
                    await end.wait_closed()
            self._serving.discard(task)

    async def end(self) -> None:
        """End all connections."""
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def repeat(self, said: bytes) -> bytes:
        """Say it to the node; what it answers first."""
        reader, writer = await asyncio.open_unix_connection(self._node)
        writer.write(said)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
        body = await reader.readexactly(length)
        writer.close()
        await writer.wait_closed()
        return head + body


@contextlib.asynccontextmanager
async def line_to(url: str, directory: Path) -> AsyncIterator[Line]:
    """Someone on the line to a node."""
    path = directory / "line.sock"
    line = Line(path, url)
    async with await asyncio.start_unix_server(line.serve, str(path)):
        try:
            yield line
        finally:
            await line.end()


def renamed(old: SandboxSpec, new: SandboxSpec) -> Change:
    """Makes one sandbox's name another's: the length stays."""
    return lambda data: data.replace(old.sandbox_id.encode(), new.sandbox_id.encode())


async def test_what_is_said_again_is_not_heard_again(tmp_path: Path) -> None:
    sim = SimNode("saaa")
    async with serving([sim], tmp_path) as urls, line_to(urls[0], tmp_path) as line:
        node = HttpNode(line.url, SECRET)
        await node.info()
        spec = spec_of("saaa")
        await node.create(spec)
        await node.kill(spec.sandbox_id)
        said = line.said[0]
        creates = said[said.index(b"POST /node/v1/creates") : said.index(b"POST /node/v1/kill")]
        del sim.kept[spec.sandbox_id]
        answer = await line.repeat(creates)
        assert answer.startswith(b"HTTP/1.1 409")
        assert not sim.kept
        # It proves nothing: else it could stand for the answer to the first.
        assert wire.PROOF_HEADER.encode() not in answer
        await node.close()


async def test_what_was_said_to_an_earlier_life_of_the_node_is_not_heard(tmp_path: Path) -> None:
    sim = SimNode("saaa")
    async with serving([sim], tmp_path) as urls, line_to(urls[0], tmp_path) as line:
        node = HttpNode(line.url, SECRET)
        await node.info()
        await node.create(spec_of("saaa"))
        await node.close()
        said = line.said[0]
        creates = said[said.index(b"POST /node/v1/creates") :]
    again = SimNode("saaa")
    async with serving([again], tmp_path):
        assert (await line.repeat(creates)).startswith(b"HTTP/1.1 409")
    assert not again.kept


@pytest.mark.parametrize(
    ("part", "status"),
    [
        ("body", 400),
        ("path", 401),
        ("query", 401),
        ("method", 401),
        ("time", 401),
        ("nonce", 401),
        ("node", 401),
        ("digest", 401),
        ("arguments", 401),
        ("header", 401),
    ],
)
async def test_what_was_changed_is_not_heard(tmp_path: Path, part: str, status: int) -> None:
    sim = SimNode("saaa")
    async with serving([sim], tmp_path) as urls, line_to(urls[0], tmp_path) as line:
        node = HttpNode(line.url, SECRET)
        kept, other = spec_of("saaa"), spec_of("saaa")
        await node.create(kept)

        def changed(data: bytes) -> bytes:
            head = data.decode()
            proof = head.partition(f"{wire.AUTH_HEADER}: ")[2].partition("\r\n")[0]
            nonce, made_at, node_id, digest, mac = proof.split(".")
            last = "0" if mac[-1] != "0" else "1"
            old, new = {
                "body": (kept.sandbox_id, other.sandbox_id),
                "path": ("/node/v1/kill", "/node/v1/get"),
                "query": ("/node/v1/kill", "/node/v1/kill?reason=x"),
                "method": ("POST", "PUT"),
                "time": (made_at, str(int(made_at) + 1)),
                "nonce": (nonce, nonce[:-1] + ("0" if nonce[-1] != "0" else "1")),
                "node": (f".{node_id}.", ".."),
                "digest": (digest, "-"),
                "arguments": ("\r\n\r\n", f"\r\n{wire.ARGUMENTS_HEADER}: e30=\r\n\r\n"),
                "header": (mac, mac[:-1] + last),
            }[part]
            assert old in head
            return head.replace(old, new, 1).encode()

        heard: list[bytes] = []

        def hears(data: bytes) -> bytes:
            heard.append(data)
            return data

        line.to_node, line.to_gateway = changed, hears
        with pytest.raises(NodeUnavailable, match="refuses") as refused:
            await node.kill(kept.sandbox_id)
        assert not isinstance(refused.value, NodeNotReached)
        assert heard[0].startswith(b"HTTP/1.1 %d" % status)
        line.to_node = as_it_is
        assert sim.kept[kept.sandbox_id].reason is None
        await node.close()


async def test_an_archive_that_was_changed_is_not_unpacked(tmp_path: Path) -> None:
    fake = FakeNode(microvm="kvm")
    archive = tmp_path / "files.tar"
    with tarfile.open(archive, "w") as tar:
        member = tarfile.TarInfo("dir/big")
        member.size = 3_000_000
        tar.addfile(member, io.BytesIO(b"x" * member.size))
    async with serving([fake], tmp_path) as urls, line_to(urls[0], tmp_path) as line:  # type: ignore[list-item]
        node = HttpNode(line.url, SECRET)
        spec = spec_of((await node.info()).node_id)
        await node.create(spec)
        where = {"sources": ["dir"], "target": "/to", "user": "root", "mode": None}

        def cut(data: bytes) -> bytes:
            """The last piece before the proof is another."""
            return data.replace(b"x" * 100, b"y" * 100)

        line.to_node = cut
        with pytest.raises(NodeUnavailable, match="body"):
            await node.unpack(spec.sandbox_id, str(archive), **where)  # type: ignore[arg-type]
        assert "/to/big" not in fake.contents[spec.sandbox_id].disk
        line.to_node = as_it_is
        await node.unpack(spec.sandbox_id, str(archive), **where)  # type: ignore[arg-type]
        assert len(fake.contents[spec.sandbox_id].disk["/to/big"]) == 3_000_000
        empty = tmp_path / "empty"
        empty.write_bytes(b"")
        with pytest.raises(InvalidRequest):
            await node.unpack(spec.sandbox_id, str(empty), **where)  # type: ignore[arg-type]
        await node.close()


async def test_answers_that_were_changed_are_not_believed(tmp_path: Path) -> None:
    sim = SimNode("saaa")
    async with serving([sim], tmp_path) as urls, line_to(urls[0], tmp_path) as line:
        node = HttpNode(line.url, SECRET)
        kept, other = spec_of("saaa"), spec_of("saaa")
        await asyncio.gather(node.create(kept), node.create(other))
        asked: tuple[Callable[[], object], ...] = (
            lambda: node.get(kept.sandbox_id),
            lambda: node.create(kept),
        )
        for ask in asked:
            line.to_gateway = renamed(kept, other)
            with pytest.raises(NodeUnavailable, match="proved"):
                await ask()  # type: ignore[misc]
            line.to_gateway = as_it_is
        # A stream's first line in place of each later one.
        first: list[bytes] = []

        def again(found: re.Match[bytes]) -> bytes:
            first.append(found[0])
            return first[0]

        chunk = re.compile(rb"[0-9a-f]+\r\n\w{32}{[^\n]*\n\r\n")
        line.to_gateway = lambda data: chunk.sub(again, data)
        with pytest.raises(NodeUnavailable, match="proved"):
            async for _ in node.exec(kept.sandbox_id, ("sh", "-c", "echo hi"), timeout_s=5):
                pass
        assert len(first) > 1
        await node.close()


async def test_the_answer_to_one_request_is_not_that_to_another(tmp_path: Path) -> None:
    sim = SimNode("saaa")
    async with serving([sim], tmp_path) as urls, line_to(urls[0], tmp_path) as line:
        node = HttpNode(line.url, SECRET)
        spec = spec_of("saaa")
        await node.create(spec)
        kept: list[bytes] = []

        def keeps(data: bytes) -> bytes:
            kept.append(data)
            return data

        line.to_gateway = keeps
        await node.get(spec.sandbox_id)
        await node.kill(spec.sandbox_id)
        running = kept[0]
        line.to_gateway = lambda _: running
        with pytest.raises(NodeUnavailable, match="does not hold"):
            await node.get(spec.sandbox_id)
        await node.close()


async def test_a_request_is_for_one_node_though_all_hold_the_same_secret(tmp_path: Path) -> None:
    one, other = SimNode("saaa"), SimNode("saab")
    async with serving([one, other], tmp_path) as urls, line_to(urls[0], tmp_path) as line:
        node = HttpNode(line.url, SECRET)
        assert (await node.info()).node_id == "saaa"
        line._node = urls[1].removeprefix("unix:")
        # A connection that is kept leads to the first.
        for kept in node._connections._idle:
            kept.abort("cut")
        with pytest.raises(NodeUnavailable, match="another node"):
            await node.create(spec_of("saaa"))
        assert not other.kept
        # The poll still sees who is there.
        assert (await node.info()).node_id == "saab"
        with pytest.raises(NodeUnavailable, match="another node"):
            await node.create(spec_of("saaa"))
        await node.close()


@pytest.mark.parametrize("ahead_s", [-95.0, 95.0])
async def test_clocks_that_differ_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    sim = SimNode("saaa")
    async with serving([sim], tmp_path) as urls:
        node = HttpNode(urls[0], SECRET)
        await node.info()
        true = Prover.request

        def from_afar(self: Prover, nonce: str, made_at_us: int, *rest: str) -> str:
            return true(self, nonce, made_at_us + int(ahead_s * 1_000_000), *rest)

        monkeypatch.setattr("opendsec_server.control.nodes.connection.Prover.request", from_afar)
        # What the node checks is what was sent.
        monkeypatch.setattr(Prover, "claims", _claims_by(true))
        asked: list[Callable[[], object]] = [
            node.info,
            lambda: node.create(spec_of("saaa")),
            lambda: node.delete_snapshot("s" * 20),
        ]
        for ask in asked:
            with pytest.raises(NodeClocksDiffer) as differ:
                await ask()  # type: ignore[misc]
            failure: OpendsecError = differ.value
            assert isinstance(failure, NodeUnavailable)
            assert ("ahead of" if ahead_s > 0 else "behind") in failure.message
            assert abs(failure.details["ahead_s"] - ahead_s) < 30
            assert "clocks" in failure.remediation
        assert not sim.kept
        monkeypatch.undo()
        await node.create(spec_of("saaa"))
        await node.close()


def test_a_nonce_is_remembered_as_long_as_its_time_is_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1_000.0
    seen = memory.Memory(lambda: now, lambda: now)
    now += 1
    span = 2 * wire.CLOCK_SKEW_S_MAX
    assert seen.note("early", int(now * 1_000_000))
    for step in range(20):
        now = 1_000.0 + step * span / 4
        at = int((now + wire.CLOCK_SKEW_S_MAX) * 1_000_000)
        assert seen.note(f"n{step}", at)
        for later in (0.0, span / 2, span - 1):
            was, now = now, now + later
            assert not seen.note(f"n{step}", at), (step, later)
            now = was
    # And no longer: what is remembered has a bound.
    now += 3 * span
    assert seen.note("late", int(now * 1_000_000))
    assert len(seen._young) + len(seen._old) == 1
    monkeypatch.setattr(memory, "REMEMBERED_MAX", 3)
    for n in range(2):
        assert seen.note(f"m{n}", int(now * 1_000_000))
    with pytest.raises(NodeUnavailable, match="too many") as full:
        seen.note("m3", int(now * 1_000_000))
    assert full.value.retryable
    assert not seen.note("m1", int(now * 1_000_000))


@pytest.mark.parametrize(
    "header",
    [
        "",
        "....",
        "a.b.c.d.e",
        f"{'0' * 32}.1.saaa.{'0' * 64}.{'0' * 64}",
        f"{'0' * 32}.-1.saaa.{'0' * 64}.{'0' * 64}",
        f"{'0' * 32}.{'9' * 400}.saaa.{'0' * 64}.{'0' * 64}",
        f"{'0' * 32}.٣.saaa.{'0' * 64}.{'0' * 64}",
        f"{'0' * 32}.1.{'s' * 99}.{'0' * 64}.{'0' * 64}",
        "\xff" * 200,
    ],
)
def test_headers_that_prove_nothing(header: str) -> None:
    assert Prover(SECRET).claims(header, "POST", "/node/v1/info", "") is None


@pytest.mark.parametrize("size", [0, 1, 2_047, 2_048, 65_536, 65_537, 3_000_000])
def test_a_digest_is_that_of_the_whole_body(size: int) -> None:
    body = bytes(n % 251 for n in range(size))
    assert digest_of(body) == hashlib.sha256(body).hexdigest()
    for secret in (b"k" * 20, b"k" * 64, b"k" * 65, b"k" * 300):
        found = Prover(secret).line("n", 7, body)
        text = b"line-from-node\nn\n7\n" + body
        assert found == hmac.new(secret, text, "sha256").hexdigest()[:32].encode()
    prover = Prover(SECRET)
    assert prover.line("n", 0, body) != prover.line("n", 1, body)
    assert prover.line("n", 0, body) != prover.line("n", 0, body + b"x")


def _claims_by(request: Callable[..., str]) -> Callable[..., object]:
    claims = Prover.claims

    def by(self: Prover, *given: str) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Prover, "request", request)
            return claims(self, *given)

    return by
