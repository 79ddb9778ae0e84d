# SPDX-License-Identifier: AGPL-3.0-only
"""The part of DNS messages (RFC 1035) that an answerer of host names needs: one question, its
addresses, and refusals. Everything else in a message is passed on unread."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

HEAD_BYTES = 12
ANSWER_BYTES_MAX = 512
"""What everybody takes in a datagram. Addresses that do not fit are left out: one is enough."""

KIND_ADDRESS = 1
KIND_ANY = 255
CLASS_INTERNET = 1

SERVER_FAILURE = 2
NO_SUCH_NAME = 3
NOT_IMPLEMENTED = 4
REFUSED = 5

_IS_ANSWER = 0x8000
_OPERATION = 0x7800
_AUTHORITATIVE = 0x0400
_RECURSION_DESIRED = 0x0100
_RECURSION_AVAILABLE = 0x0080
_LABEL_BYTES_MAX = 63
_NAME_BYTES_MAX = 255
_NAME_AT_QUESTION = 0xC000 | HEAD_BYTES
_RECORD = struct.Struct(">HHHIH4s")
_TTL_S = 0
"""Members come and go: nothing is to be remembered."""


@dataclass(frozen=True, slots=True)
class Question:
    """What was asked.

    Attributes:
        name: In lower case, without the last dot.
        kind: Of record.
        end: Where the question ends in its message.
    """

    name: str
    kind: int
    end: int


def is_query(message: bytes) -> bool:
    """Whether a message wants an answer at all. Answers to answers would go in circles."""
    return len(message) >= HEAD_BYTES and not message[2] & 0x80


def parse(message: bytes) -> Question | None:
    """The single question of a standard query; None: it is something else, or malformed."""
    if not is_query(message):
        return None
    flags, questions = struct.unpack_from(">HH", message, 2)
    if flags & _OPERATION or questions != 1:
        return None
    labels: list[str] = []
    place = HEAD_BYTES
    while place < len(message) and (length := message[place]):
        place += 1
        if length > _LABEL_BYTES_MAX or place + length - HEAD_BYTES >= _NAME_BYTES_MAX:
            return None
        labels.append(message[place : place + length].decode("latin-1").lower())
        place += length
    end = place + 5
    if end > len(message):
        return None
    kind, klass = struct.unpack_from(">HH", message, place + 1)
    if klass != CLASS_INTERNET:
        return None
    return Question(".".join(labels), kind, end)


def answer(message: bytes, question: Question, addresses: Sequence[str]) -> bytes:
    """The answer with these addresses; to a question of another kind than addresses, one without
    records: the name is there, which is not the same as a name that is not."""
    room = (ANSWER_BYTES_MAX - question.end) // _RECORD.size
    wanted = addresses[:room] if question.kind in (KIND_ADDRESS, KIND_ANY) else ()
    head = _head(message, _AUTHORITATIVE, 1, len(wanted))
    records = (
        _RECORD.pack(
            _NAME_AT_QUESTION, KIND_ADDRESS, CLASS_INTERNET, _TTL_S, 4, socket.inet_aton(address)
        )
        for address in wanted
    )
    return head + message[HEAD_BYTES : question.end] + b"".join(records)


def failure(message: bytes, question: Question | None, code: int) -> bytes:
    """An answer without records, with a reason."""
    if question is None:
        return _head(message, code, 0, 0)
    return _head(message, code, 1, 0) + message[HEAD_BYTES : question.end]


def _head(message: bytes, flags: int, questions: int, answers: int) -> bytes:
    (asked,) = struct.unpack_from(">H", message, 2)
    kept = asked & (_OPERATION | _RECURSION_DESIRED)
    flags |= _IS_ANSWER | _RECURSION_AVAILABLE | kept
    return message[:2] + struct.pack(">HHHHH", flags, questions, answers, 0, 0)


def answers(reply: bytes, message: bytes, question: Question) -> bool:
    """Whether a reply is one to this message: number, and the question it repeats."""
    return (
        len(reply) >= HEAD_BYTES
        and reply[:2] == message[:2]
        and bool(reply[2] & 0x80)
        and reply[HEAD_BYTES : question.end].lower() == message[HEAD_BYTES : question.end].lower()
    )
