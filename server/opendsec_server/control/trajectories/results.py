# SPDX-License-Identifier: AGPL-3.0-only
"""What an action gave, as it is kept and shown."""

from __future__ import annotations

import base64
from typing import Any, Literal

import msgspec

from opendsec_server.contract.actions import KeptOutput, KeptProgram

UTF8_CHAR_BYTES_MAX = 4


class Output(msgspec.Struct, kw_only=True, frozen=True):
    """One output of a program. Where it was too long, its middle is missing."""

    head: str = ""
    tail: str = ""
    """What follows after the cut. Empty when nothing is missing."""
    bytes: int = 0
    """All that was written, also what is missing here."""
    cut_bytes: int = 0
    """Missing between ``head`` and ``tail``. 0: it is whole."""
    encoding: Literal["utf-8", "base64"] = "utf-8"


class ActionResult(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What an action gave. Which fields are there depends on its kind."""

    exit_code: int | None = None
    """None: it did not exit by itself."""
    signal: int | None = None
    timed_out: bool = False
    stdout: Output | None = None
    stderr: Output | None = None
    content: str | None = None
    """Of a file that was read; base64."""
    content_sha256: str | None = None
    bytes: int | None = None
    """Of a file that was written or read."""
    snapshot_id: str | None = None


class ActionError(msgspec.Struct, kw_only=True, frozen=True):
    """Why an action was not done, as it was told first."""

    code: str
    message: str
    remediation: str
    retryable: bool
    fault: str
    details: dict[str, Any] = {}


_decode_result = msgspec.json.Decoder(ActionResult).decode
_decode_error = msgspec.json.Decoder(ActionError).decode


def pack(value: msgspec.Struct | dict[str, object]) -> str:
    """As the store keeps it."""
    return msgspec.json.encode(value).decode()


def unpack_result(text: str | None) -> ActionResult | None:
    """What ``pack`` made this text of."""
    return None if text is None else _decode_result(text)


def unpack_error(text: str | None) -> ActionError | None:
    """What ``pack`` made this text of."""
    return None if text is None else _decode_error(text)


def result_of(program: KeptProgram) -> ActionResult:
    """The result of a program that has ended."""
    return ActionResult(
        exit_code=program.exit_code,
        signal=program.signal,
        timed_out=program.timed_out,
        stdout=output_of(program.stdout),
        stderr=output_of(program.stderr),
    )


def output_of(kept: KeptOutput) -> Output:
    """An output as text if it is text, else in base64.

    A cut that falls into a character is moved to its edge.
    """
    head, tail, cut = kept.head, kept.tail, kept.cut_bytes
    if not cut:
        head, tail = head + tail, b""
    else:
        head, tail = _whole_end(head), _whole_start(tail)
        cut = kept.bytes_total - len(head) - len(tail)
    try:
        return Output(head=head.decode(), tail=tail.decode(), bytes=kept.bytes_total, cut_bytes=cut)
    except UnicodeDecodeError:
        return Output(
            head=base64.b64encode(head).decode(),
            tail=base64.b64encode(tail).decode(),
            bytes=kept.bytes_total,
            cut_bytes=cut,
            encoding="base64",
        )


def _whole_end(data: bytes) -> bytes:
    """Without the first bytes of a character that goes on behind the cut."""
    for back in range(1, min(UTF8_CHAR_BYTES_MAX, len(data) + 1)):
        byte = data[-back]
        if byte & 0xC0 == 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-back] if length > back else data
        if byte < 0x80:
            break
    return data


def _whole_start(data: bytes) -> bytes:
    """Without the last bytes of a character that begins before the cut."""
    for start in range(min(UTF8_CHAR_BYTES_MAX, len(data))):
        if data[start] & 0xC0 != 0x80:
            return data[start:]
    return data
