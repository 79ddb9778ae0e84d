# SPDX-License-Identifier: AGPL-3.0-only
"""The parts of groups that need no machine: DNS messages, commands, names."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec_server.contract.errors import InvalidRequest
from opendsec_server.contract.ids import new_group_id
from opendsec_server.contract.node import GroupMembership
from opendsec_server.node.groups import messages, rules, upstream
from opendsec_server.node.groups.answerer import Answerer
from opendsec_server.node.groups.membership import check
from opendsec_server.node.network.policy import METADATA, RESOLVERS


def query(name: str, kind: int = 1, *, flags: int = 0x0100, klass: int = 1) -> bytes:
    labels = b"".join(bytes([len(x)]) + x.encode() for x in name.split(".") if x)
    head = struct.pack(">6H", 0x1234, flags, 1, 0, 0, 0)
    return head + labels + struct.pack(">BHH", 0, kind, klass)


LABELS = st.from_regex(r"[a-zA-Z0-9-]{1,63}", fullmatch=True)


@given(st.lists(LABELS, min_size=1, max_size=3), st.integers(0, 65_535), st.binary(max_size=40))
def test_questions_are_read(labels: list[str], kind: int, more: bytes) -> None:
    name = ".".join(labels)
    asked = query(name, kind)
    question = messages.parse(asked + more)
    assert question == messages.Question(name.lower(), kind, len(asked))


@given(st.binary(max_size=600))
def test_no_bytes_confuse(data: bytes) -> None:
    """Whatever comes: a question within the bytes, or none; and an answer that is one."""
    question = messages.parse(data)
    if question is not None:
        assert messages.HEAD_BYTES < question.end <= len(data)
        assert len(question.name) <= 255
        for made in (
            messages.answer(data, question, ["10.0.0.1"] * 100),
            messages.failure(data, question, messages.REFUSED),
        ):
            assert len(made) <= 512
            assert made[:2] == data[:2]
            assert not messages.is_query(made)
            assert messages.answers(made, data, question)
    elif messages.is_query(data):
        assert not messages.is_query(messages.failure(data, None, messages.NOT_IMPLEMENTED))


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        query("db")[:11],
        query("db")[:-1],
        query("db", flags=0x8100),
        query("db", flags=0x2900),
        query("db", klass=3),
        query("db")[:4] + b"\0\2" + query("db")[6:],
        query("db")[:12] + b"\xc0\x0c\0\1\0\1",
        query(".".join(["x" * 63] * 4)),
    ],
    ids=["empty", "short", "cut", "answer", "update", "chaos", "two", "pointer", "long"],
)
def test_what_is_no_question(bad: bytes) -> None:
    assert messages.parse(bad) is None


def test_answers() -> None:
    asked = query("Db")
    question = messages.parse(asked)
    assert question is not None
    made = messages.answer(asked, question, ["10.0.0.1", "10.0.0.2"])
    number, flags, *counts = struct.unpack(">6H", made[:12])
    assert (number, flags, counts) == (0x1234, 0x8580, [1, 2, 0, 0])
    assert made[12 : question.end] == asked[12:], "as it was spelt"
    records = made[question.end :]
    assert [records[at + 12 : at + 16] for at in (0, 16)] == [
        socket.inet_aton("10.0.0.1"),
        socket.inet_aton("10.0.0.2"),
    ]
    longest = query(".".join(["x" * 62] * 4))
    question = messages.parse(longest)
    assert question is not None
    many = messages.answer(longest, question, ["10.0.0.1"] * 100)
    assert len(many) <= 512
    assert struct.unpack(">H", many[6:8])[0] == (512 - question.end) // 16
    six = messages.parse(query("db", 28))
    assert six is not None
    empty = messages.answer(query("db", 28), six, ["10.0.0.1"])
    assert struct.unpack(">6H", empty[:12])[1:] == (0x8580, 1, 0, 0, 0)


def test_replies_of_others_are_not_taken() -> None:
    asked = query("service.example")
    question = messages.parse(asked)
    assert question is not None
    reply = messages.answer(asked, question, ["10.0.0.1"])
    assert messages.answers(reply, asked, question)
    assert not messages.answers(b"\0\0" + reply[2:], asked, question), "another number"
    assert not messages.answers(asked, asked, question), "a question"
    other = query("another.example")
    assert not messages.answers(reply, other, messages.parse(other) or question)
    assert not messages.answers(reply[:11], asked, question)


def test_commands() -> None:
    ends = [("od-1", "10.0.0.1"), ("od-2", "10.0.0.2")]
    made = rules.connect("od", [(ends[0], ends[1])])
    assert made == (
        'add element inet opendsec_od peers { "od-1" . 10.0.0.1 . "od-2" . 10.0.0.2, '
        '"od-2" . 10.0.0.2 . "od-1" . 10.0.0.1 }\n'
    )
    undone = rules.disconnect("od", [(ends[0], ends[1])]).splitlines()
    assert undone == [made.strip(), made.strip().replace("add ", "delete ", 1)]
    assert rules.connect("od", []) == rules.disconnect("od", []) == ""
    assert rules.way(*ends) == rules.way(*reversed(ends))
    assert rules.replace_peers([]) == "flush set inet sandbox peers\n"
    assert "{ 10.0.0.1, 10.0.0.2 }" in rules.replace_peers(["10.0.0.2", "10.0.0.1"])
    for forwarded in (True, False):
        fresh = rules.names_inside(forwarded=forwarded, fresh=True)
        assert "flush" not in fresh, "to let go of something is slow"
        commands = rules.names_inside(forwarded=forwarded, fresh=False)
        assert f"names {{ {', '.join(RESOLVERS)} }}" in commands
        assert not [closed for closed in METADATA if closed in commands]


@pytest.mark.parametrize("name", ["db", "Db-1", "a.b.example", "_sip", "x" * 63, "1"])
def test_names_that_are_taken(name: str) -> None:
    check(GroupMembership(group_id=new_group_id(), name=name, aliases=("other",)))


@pytest.mark.parametrize("name", ["", ".", "a.", "-a", "a-", "a b", "a;b", "é", "x" * 64, "a\n"])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        check(GroupMembership(group_id=new_group_id(), name="db", aliases=(name,)))


LONG = b"\xab" * 3_000


@pytest.fixture
async def answerer(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """The port of one. Its resolvers: one talks nothing but rubbish, the other can say ``LONG``."""

    class Rubbish(asyncio.DatagramProtocol):
        def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
            self.transport = transport

        def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
            self.transport.sendto(data, addr)
            self.transport.sendto(b"\0\0" + data[2:3] + b"\x80" + data[4:], addr)

    class Useful(Rubbish):
        def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
            self.transport.sendto(data[:2] + b"\x81\x80" + data[4:], addr)

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        length = int.from_bytes(await reader.readexactly(2), "big")
        asked = await reader.readexactly(length)
        reply = asked[:2] + b"\x81\x80" + asked[4:] + LONG
        writer.write(len(reply).to_bytes(2, "big") + reply)
        writer.close()

    loop = asyncio.get_running_loop()
    useful, _ = await loop.create_datagram_endpoint(Useful, local_addr=("127.0.0.2", 0))
    port = useful.get_extra_info("sockname")[1]
    rubbish, _ = await loop.create_datagram_endpoint(Rubbish, local_addr=("127.0.0.3", port))
    server = await asyncio.start_server(converse, "127.0.0.2", port)
    monkeypatch.setattr(upstream, "_PORT", port)
    monkeypatch.setattr(upstream, "_RESOLVER_TIMEOUT_S", 0.2)
    ends = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), socket.create_server(("127.0.0.1", 0))
    port_of_answerer = ends[1].getsockname()[1]
    ends[0].bind(("127.0.0.1", port_of_answerer))
    for end in ends:
        end.setblocking(False)
    made = Answerer(
        ends,
        lambda name: {"db": ("10.0.0.1",), "gone": ()}.get(name),
        lambda: True,
        upstream.Upstream(lambda: ("127.0.0.3", "127.0.0.2")),
    )
    yield port_of_answerer
    made.close()
    useful.close()
    rubbish.close()
    server.close()


async def ask(answerer: int, message: bytes) -> bytes:
    def body() -> bytes:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
            end.settimeout(20)
            end.connect(("127.0.0.1", answerer))
            end.send(message)
            return end.recv(4_096)

    return await asyncio.to_thread(body)


async def test_questions_are_passed_on(answerer: int) -> None:
    """To the next resolver, after one whose replies are no answers; long answers by connection."""
    asked = query("service.example")
    reply = await ask(answerer, asked)
    assert reply == asked[:2] + b"\x81\x80" + asked[4:], "under the asker's own number"
    assert (await ask(answerer, query("gone")))[3] & 15 == messages.NO_SUCH_NAME
    assert (await ask(answerer, query("nobody")))[3] & 15 == messages.NO_SUCH_NAME
    assert (await ask(answerer, query("db")))[-4:] == socket.inet_aton("10.0.0.1")
    reader, writer = await asyncio.open_connection("127.0.0.1", answerer)
    for _ in range(2):
        writer.write(len(asked).to_bytes(2, "big") + asked)
        length = int.from_bytes(await reader.readexactly(2), "big")
        reply = await reader.readexactly(length)
        assert reply == asked[:2] + b"\x81\x80" + asked[4:] + LONG
    writer.write(b"\0\4what")
    assert await reader.read() == b"", "what is no question ends the conversation"
    writer.close()
