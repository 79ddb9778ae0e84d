# SPDX-License-Identifier: AGPL-3.0-only
# ruff: noqa: PTH101, PTH102, PTH103, PTH108, PTH112, PTH114, PTH118, PTH123
# ruff: noqa: PTH208, S103, UP031
"""The worker's front: one call at a time, its limits, and the scrub after it.

What holds against code that does its worst:

* Each call runs as a user of its own (a number that no other call of this worker has), so it
  cannot signal, trace or read this program, the zygote or the files of an earlier call.
* Its result comes by a pipe made for it alone. What it writes anywhere else is output.
* The zygote is a subreaper: the call is over when it has no child left, and not before. What is
  left is killed as that user, which reaches everything that the call has started.
* A worker that cannot be brought back to how it began says so, and is thrown away.

Frames, both ways: length of a JSON head and of a body (4 bytes each, big-endian), then both.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import select
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

SIZES = struct.Struct("!II")
PAYLOAD = struct.Struct("!III")
HEAD_BYTES_MAX = 1 << 20
BODY_BYTES_MAX = 64 << 20
HANDSHAKE_S = 30.0
KILL_EVERY_S = 0.2
END_S = 10.0
"""A call that was killed has ended after so long, or the worker is given up."""
DRAIN_S = 5.0
CODES_KEPT = 8
UID_FIRST, UID_COUNT = 50_000, 10_000
HOME = "/var/lib/opendsec-fn"
SKIPPED = ("/proc", "/sys", "/dev", "/.opendsec")
OPEN_DIRS = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue")  # noqa: S108
IPC = ("/proc/sysvipc/shm", "/proc/sysvipc/sem", "/proc/sysvipc/msg")
OOM_COUNTERS = (
    "/sys/fs/cgroup/memory.events",
    "/sys/fs/cgroup/memory/memory.oom_control",
    "/proc/vmstat",
)
"""In this order: the last one counts for the whole machine, which is right in a virtual one."""


class HostGone(Exception):
    """The connection has ended; so has this worker."""


class Link:
    """Frames to and from the server."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def _read(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            piece = self.sock.recv(min(count - len(parts), 1 << 20))
            if not piece:
                raise HostGone
            parts += piece
        return bytes(parts)

    def receive(self) -> tuple[dict[str, Any], bytes]:
        head_len, body_len = SIZES.unpack(self._read(SIZES.size))
        if head_len > HEAD_BYTES_MAX or body_len > BODY_BYTES_MAX:
            raise HostGone
        return json.loads(self._read(head_len)), self._read(body_len)

    def send(self, head: dict[str, Any], *body: bytes) -> None:
        text = json.dumps(head).encode()
        sizes = SIZES.pack(len(text), sum(len(part) for part in body))
        self.sock.sendall(b"".join((sizes, text, *body)))


def accept(secret: str) -> Link:
    """The one connection that knows the secret. Nobody can connect afterwards."""
    until = time.monotonic() + HANDSHAKE_S
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        while True:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise HostGone
            listener.settimeout(left_s)
            sock, _ = listener.accept()
            link = Link(sock)
            sock.settimeout(min(left_s, 5.0))
            with contextlib.suppress(HostGone, OSError):
                if hmac.compare_digest(link._read(len(secret)), secret.encode()):
                    sock.settimeout(None)
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    return link
            sock.close()


class Zygote:
    """The process that forks calls."""

    def __init__(self, source: str, config: dict[str, Any]) -> None:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock = ours
        with its:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", source, str(its.fileno())],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
            )
        # A packet has its bounds; what does not fit into one goes by a pipe.
        reader, writer = os.pipe()
        self.give({}, [reader])
        os.close(reader)
        with os.fdopen(writer, "wb") as file, contextlib.suppress(BrokenPipeError):
            file.write(json.dumps(config).encode())

    def give(self, message: dict[str, Any], fds: list[int]) -> None:
        """A message, and open files with it."""
        rights = struct.pack("%di" % len(fds), *fds)
        self.sock.sendmsg(
            [json.dumps(message).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        )

    def told(self) -> dict[str, Any]:
        """Its next word. Empty: it has died."""
        try:
            text = self.sock.recv(1 << 16)
        except OSError:
            text = b""
        return json.loads(text) if text else {}


def kill_all_of(uid: int) -> None:
    """Kill every process of a user. The kernel looks at all of them at once, so that not even
    one that forks without end gets away."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        os._exit(0)
    os.waitpid(pid, 0)


def oom_kills() -> int | None:
    """How often the kernel has killed here for want of memory. None: it does not tell."""
    for path in OOM_COUNTERS:
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            for line in file:
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return None


class Gauge:
    """A stream of a call: what is kept of it, and what was left out."""

    def __init__(self, fd: int, bytes_max: int) -> None:
        self.fd = fd
        self.bytes_max = bytes_max
        self.kept = bytearray()
        self.lost = 0
        self.open = True

    def read(self) -> None:
        try:
            piece = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return
        if not piece:
            self.open = False
            return
        room = self.bytes_max - len(self.kept)
        self.kept += piece[:room]
        self.lost += max(0, len(piece) - room)


class Call:
    """One call, from its first byte to the last of its processes.

    Its process is made before there is anything to call (``spawn``), and waits: making it takes
    longer than most calls.
    """

    def __init__(self, front: Front, uid: int, place: str) -> None:
        self.front, self.uid, self.place = front, uid, place
        self.stack = contextlib.ExitStack()
        self.left = memoryview(b"")
        self.killed: str | None = None
        self.report: dict[str, Any] | None = None

    def spawn(self) -> None:
        """Have the zygote make the process."""
        given, self.feed = self._pipe()
        self.result_r, result_w = self._pipe()
        self.out_r, out_w = self._pipe()
        self.err_r, err_w = self._pipe()
        theirs = [given, result_w, out_w, err_w]
        self.front.zygote.give({"uid": self.uid, "place": self.place}, theirs)
        for fd in theirs:
            self._close(fd)
        for fd in (self.feed, self.result_r, self.out_r, self.err_r):
            os.set_blocking(fd, False)

    def died_early(self) -> bool:
        """Whether the process has ended before it was given anything: then another one is made."""
        ready, _, _ = select.select([self.front.zygote.sock], [], [], 0)
        return bool(ready)

    def give_up(self) -> None:
        """Forget a process that has died early."""
        if not self.front.zygote.told().get("clean"):
            raise Unclean("a process that was to make a call has ended")
        self.stack.close()

    def run(self, head: dict[str, Any], payload: bytes) -> None:
        """Make the call and tell the server what came of it."""
        self.left = memoryview(payload)
        ooms = oom_kills()
        began = time.monotonic()
        self.result = Gauge(self.result_r, head["result_max"])
        self.out = Gauge(self.out_r, head["stdout_max"])
        self.err = Gauge(self.err_r, head["stderr_max"])
        with self.stack:
            try:
                self._watch(began + head["timeout_s"])
                self._drain()
            except Unclean:
                # What came of the call is known all the same; the worker ends after it.
                if self.killed is not None:
                    self._tell(began, ooms)
                raise
        self._tell(began, ooms)

    def _tell(self, began: float, ooms: int | None) -> None:
        seconds = time.monotonic() - began
        report = self.report or {}
        more = oom_kills()
        self.front.link.send(
            {
                "done": self.killed or "exited",
                "status": report.get("status"),
                "oom": ooms is not None and more is not None and more > ooms,
                "cpu_s": report.get("cpu_s", 0.0),
                "peak_kb": report.get("peak_kb", 0),
                "seconds": seconds,
                "result": len(self.result.kept),
                "result_lost": self.result.lost,
                "stdout": len(self.out.kept),
                "stdout_lost": self.out.lost,
                "stderr": len(self.err.kept),
                "stderr_lost": self.err.lost,
            },
            bytes(self.result.kept),
            bytes(self.out.kept),
            bytes(self.err.kept),
        )

    def _pipe(self) -> tuple[int, int]:
        reader, writer = os.pipe()
        self.front.fds.update((reader, writer))
        self.stack.callback(self._close, reader)
        self.stack.callback(self._close, writer)
        return reader, writer

    def _close(self, fd: int) -> None:
        # Once only: the number may be another file by now.
        if fd in self.front.fds:
            self.front.fds.discard(fd)
            os.close(fd)

    def _write(self) -> None:
        try:
            while self.left:
                self.left = self.left[os.write(self.feed, self.left[: 1 << 16]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.left = memoryview(b"")
        self._close(self.feed)

    def _watch(self, deadline: float) -> None:
        """Until the zygote says that nothing of the call is left."""
        zygote, host = self.front.zygote.sock.fileno(), self.front.link.sock.fileno()
        gave_up_at = 0.0
        while self.report is None:
            now = time.monotonic()
            if self.killed is None and now >= deadline:
                self._kill("timeout")
            if self.killed is None and self.result.lost:
                self._kill("result_too_large")
            if self.killed is None:
                wait_s = deadline - now
            else:
                gave_up_at = gave_up_at or now + END_S
                if now > gave_up_at:
                    raise Unclean("what the call started cannot be ended")
                # Again: a process that was just being made had not that user yet.
                kill_all_of(self.uid)
                wait_s = KILL_EVERY_S
            poll = select.poll()
            poll.register(zygote, select.POLLIN)
            poll.register(host, select.POLLIN)
            for gauge in (self.result, self.out, self.err):
                if gauge.open:
                    poll.register(gauge.fd, select.POLLIN)
            if self.left:
                poll.register(self.feed, select.POLLOUT)
            elif self.feed in self.front.fds:
                self._close(self.feed)
            for fd, _events in poll.poll(max(0.0, wait_s) * 1000):
                if fd == zygote:
                    self.report = self.front.zygote.told()
                    if not self.report:
                        raise Unclean("the process that makes calls has died")
                elif fd == host:
                    head, _ = self.front.link.receive()
                    if head.get("cancel") and self.killed is None:
                        self._kill("cancelled")
                elif fd == self.feed:
                    self._write()
                else:
                    self._gauge_of(fd).read()
        if not self.report.get("clean"):
            raise Unclean("what the call started cannot be ended")

    def _kill(self, why: str) -> None:
        self.killed = why
        kill_all_of(self.uid)

    def _gauge_of(self, fd: int) -> Gauge:
        return next(gauge for gauge in (self.result, self.out, self.err) if gauge.fd == fd)

    def _drain(self) -> None:
        """Nobody holds the other ends any more: what is in the pipes is all there is."""
        until = time.monotonic() + DRAIN_S
        for gauge in (self.result, self.out, self.err):
            os.set_blocking(gauge.fd, True)
            while gauge.open:
                if time.monotonic() > until:
                    raise Unclean("somebody still holds the pipes of a call that has ended")
                ready, _, _ = select.select([gauge.fd], [], [], 0.5)
                if ready:
                    gauge.read()


class Unclean(Exception):
    """This worker must not be used again."""


def open_places() -> Iterator[str]:
    """Directories in which any user may make files; close those that need not be."""
    for path, names, files in os.walk("/"):
        if path == "/":
            names[:] = [name for name in names if "/" + name not in SKIPPED]
        for name in [*names, *files]:
            full = os.path.join(path, name)
            try:
                mode = os.lstat(full).st_mode
            except OSError:
                continue
            if not mode & stat.S_IWOTH or stat.S_ISLNK(mode):
                continue
            if full not in OPEN_DIRS:
                try:
                    os.chmod(full, stat.S_IMODE(mode) & ~stat.S_IWOTH)
                    continue
                except OSError:
                    pass
            if stat.S_ISDIR(mode) and full not in OPEN_DIRS:
                yield full
    for full in OPEN_DIRS:
        if os.path.isdir(full) and not os.path.islink(full):
            yield full


class Scrub:
    """Brings the worker back to how it began."""

    def __init__(self) -> None:
        self.known = {path: frozenset(os.listdir(path)) for path in open_places()}
        self.ipc = {path: self._ipc(path) for path in IPC}

    @staticmethod
    def _ipc(path: str) -> bytes | None:
        try:
            with open(path, "rb") as file:
                return file.read()
        except OSError:
            return None

    def __call__(self, place: str) -> str | None:
        """None: clean. Else why not."""
        try:
            _remove(place)
            for path, known in self.known.items():
                for name in os.listdir(path):
                    if name not in known:
                        _remove(os.path.join(path, name))
        except (OSError, RecursionError) as exc:
            return "files of a call cannot be removed: %r" % (exc,)
        for path, before in self.ipc.items():
            if self._ipc(path) != before:
                return "a call has left System V IPC behind (%s)" % path
        return None


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


class Front:
    """The worker."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.fds: set[int] = set()
        self.codes: dict[str, bytes] = {}
        self.calls = 0

    def begin(self) -> None:
        head, body = self.link.receive()
        config = json.loads(body)
        self.zygote = Zygote(head["zygote"], config)
        told = self.zygote.told()
        if "ready" not in told:
            self.link.send({"failed": told.get("failed", "Python ended before it was ready")})
            raise HostGone
        os.makedirs(HOME, mode=0o711, exist_ok=True)
        os.chmod(HOME, 0o711)
        self.scrub = Scrub()
        self.link.send({"ready": True, "python": told["ready"]})

    def serve(self) -> None:
        call = self._prepare()
        while True:
            head, body = self.link.receive()
            if "cancel" in head:
                continue  # It had ended already.
            payload = self._payload(head, body)
            del body
            try:
                if call.died_early():
                    call.give_up()
                    call = self._again(call)
                call.run(head, payload)
            except Unclean as exc:
                self.link.send({"unclean": str(exc)})
                return
            del payload
            why = self.scrub(call.place)
            self.link.send({"unclean": why} if why else {"idle": True})
            if why:
                return
            call = self._prepare()

    def _prepare(self) -> Call:
        uid = UID_FIRST + self.calls % UID_COUNT
        self.calls += 1
        place = "%s/%d" % (HOME, uid)
        os.mkdir(place, 0o700)
        os.chown(place, uid, uid)
        call = Call(self, uid, place)
        call.spawn()
        return call

    def _again(self, dead: Call) -> Call:
        why = self.scrub(dead.place)
        if why:
            raise Unclean(why)
        return self._prepare()

    def _payload(self, head: dict[str, Any], body: bytes) -> bytes:
        """What the call's process reads: its limits, the code, and what is different each time."""
        code = self._code(head, body)
        item = body[head["code_bytes"] :]
        limits = json.dumps({"memory": head["memory"], "processes": head["processes"]}).encode()
        return b"".join((PAYLOAD.pack(len(limits), len(code), len(item)), limits, code, item))

    def _code(self, head: dict[str, Any], body: bytes) -> bytes:
        """What is called is sent once, and known by its digest from then on."""
        name = head["code"]
        if head["code_bytes"]:
            if len(self.codes) >= CODES_KEPT:
                self.codes.clear()
            self.codes[name] = body[: head["code_bytes"]]
        return self.codes[name]


def main() -> int:
    if sys.version_info < (3, 8):  # noqa: UP036
        print(json.dumps({"failed": "Python %d.%d is too old" % sys.version_info[:2]}), flush=True)
        return 3
    secret = os.environ.pop("OPENDSEC_FN_SECRET")
    with contextlib.suppress(HostGone, OSError, socket.timeout):
        front = Front(accept(secret))
        front.begin()
        front.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
