# SPDX-License-Identifier: Apache-2.0
"""The guest agent's protocol: frames and messages of Connect with the JSON codec. No I/O.

A frame is one byte of flags, the length as four bytes big-endian, and JSON. The last frame of an
answer has flag 2 and holds ``{}`` or ``{"error": {"code", "message"}}``.
Source: https://connectrpc.com/docs/protocol
"""

from __future__ import annotations

import signal
import struct
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import msgspec

from . import _limits
from ._errors import BadResponse
from ._models import FileInfo, ProcessInfo, WatchEvent

FLAG_COMPRESSED = 0x01
FLAG_END = 0x02
_HEADER = struct.Struct(">BI")


def encode_frame(message: Any) -> bytes:
    """One message as a frame."""
    payload = msgspec.json.encode(message)
    return _HEADER.pack(0, len(payload)) + payload


class FrameDecoder:
    """Cuts a byte stream into frames, however the network has cut it."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield ``(flags, payload)`` of each frame that is complete.

        Raises:
            BadResponse: a frame is compressed (never asked for) or absurdly long.
        """
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            flags, length = _HEADER.unpack_from(self._buffer)
            if flags & FLAG_COMPRESSED or length > _limits.FRAME_BYTES_MAX:
                raise BadResponse("The sandbox's stream holds a frame that makes no sense.")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield flags, payload


class EndRecordError(msgspec.Struct):
    code: str = "unknown"
    message: str = ""


class EndRecord(msgspec.Struct):
    error: EndRecordError | None = None


# --- processes ---------------------------------------------------------------


class StartEvent(msgspec.Struct):
    pid: int = 0


class DataEvent(msgspec.Struct):
    stdout: bytes | None = None
    stderr: bytes | None = None
    pty: bytes | None = None


class EndEvent(msgspec.Struct, rename="camel"):
    exit_code: int = 0
    exited: bool = False
    status: str = ""
    error: str | None = None


class ProcessEvent(msgspec.Struct):
    start: StartEvent | None = None
    data: DataEvent | None = None
    end: EndEvent | None = None


class ProcessMessage(msgspec.Struct):
    event: ProcessEvent = msgspec.field(default_factory=ProcessEvent)


class WireProcessConfig(msgspec.Struct):
    cmd: str = ""
    args: tuple[str, ...] = ()
    envs: dict[str, str] = {}
    cwd: str | None = None


class WireProcess(msgspec.Struct):
    config: WireProcessConfig = msgspec.field(default_factory=WireProcessConfig)
    pid: int = 0
    tag: str | None = None

    def public(self) -> ProcessInfo:
        c = self.config
        return ProcessInfo(
            pid=self.pid, cmd=c.cmd, args=c.args, env=c.envs, cwd=c.cwd, tag=self.tag
        )


class ListReply(msgspec.Struct):
    processes: list[WireProcess] = []


# What the agent's runtime calls the signals in a status "signal: killed".
_SIGNAL_WORDS = {
    "hangup": signal.SIGHUP,
    "interrupt": signal.SIGINT,
    "quit": signal.SIGQUIT,
    "illegal instruction": signal.SIGILL,
    "trace/breakpoint trap": signal.SIGTRAP,
    "aborted": signal.SIGABRT,
    "bus error": signal.SIGBUS,
    "floating point exception": signal.SIGFPE,
    "killed": signal.SIGKILL,
    "user defined signal 1": signal.SIGUSR1,
    "segmentation fault": signal.SIGSEGV,
    "user defined signal 2": signal.SIGUSR2,
    "broken pipe": signal.SIGPIPE,
    "alarm clock": signal.SIGALRM,
    "terminated": signal.SIGTERM,
    "cpu time limit exceeded": signal.SIGXCPU,
    "file size limit exceeded": signal.SIGXFSZ,
    "bad system call": signal.SIGSYS,
}
_SIGNAL_PREFIX = "signal: "


def ending_signal(event: EndEvent) -> int | None:
    """The signal that ended a process, from its end event; None if it exited."""
    if event.exited or not event.status.startswith(_SIGNAL_PREFIX):
        return None
    word = event.status.removeprefix(_SIGNAL_PREFIX).removesuffix(" (core dumped)").strip()
    if word.startswith("signal ") and word[7:].isdigit():
        return int(word[7:])
    known = _SIGNAL_WORDS.get(word)
    return int(known) if known is not None else None


def exit_code_of(event: EndEvent) -> tuple[int, int | None]:
    """Exit code as a shell counts it, and the signal if one ended the process.

    Raises:
        BadResponse: the event holds neither, and an exit code must never be made up.
    """
    number = ending_signal(event)
    if number is not None:
        return 128 + number, number
    if event.exited or event.exit_code > 0:
        return event.exit_code, None
    raise BadResponse(
        f"The sandbox did not say how the process ended (status {event.status!r}, "
        f"error {event.error!r})."
    )


# --- files -------------------------------------------------------------------

_FILE_TYPES = {
    "FILE_TYPE_FILE": "file",
    "FILE_TYPE_DIRECTORY": "directory",
    "FILE_TYPE_SYMLINK": "symlink",
    "file": "file",
    "dir": "directory",
    "directory": "directory",
}
_EVENT_TYPES = {
    "EVENT_TYPE_CREATE": "create",
    "EVENT_TYPE_WRITE": "write",
    "EVENT_TYPE_REMOVE": "remove",
    "EVENT_TYPE_RENAME": "rename",
    "EVENT_TYPE_CHMOD": "chmod",
}


class WireEntry(msgspec.Struct, rename="camel"):
    name: str = ""
    type: str = ""
    path: str = ""
    size: int = 0
    mode: int = 0
    permissions: str = ""
    owner: str = ""
    group: str = ""
    modified_time: datetime | None = None
    symlink_target: str | None = None
    metadata: dict[str, str] | None = None

    def public(self) -> FileInfo:
        return FileInfo(
            name=self.name,
            type=_FILE_TYPES.get(self.type, "other"),
            path=self.path,
            size_bytes=self.size,
            mode=self.mode,
            permissions=self.permissions,
            owner=self.owner,
            group=self.group,
            modified_at=self.modified_time,
            symlink_target=self.symlink_target,
            metadata=self.metadata or {},
        )


class EntryReply(msgspec.Struct):
    entry: WireEntry = msgspec.field(default_factory=WireEntry)


class EntriesReply(msgspec.Struct):
    entries: list[WireEntry] = []


class WireChange(msgspec.Struct):
    name: str = ""
    type: str = ""
    entry: WireEntry | None = None

    def public(self) -> WatchEvent:
        return WatchEvent(
            type=_EVENT_TYPES.get(self.type, "other"),
            name=self.name,
            entry=self.entry.public() if self.entry else None,
        )


class WatchMessage(msgspec.Struct):
    start: dict[str, Any] | None = None
    filesystem: WireChange | None = None


class EmptyReply(msgspec.Struct):
    pass
