# SPDX-License-Identifier: AGPL-3.0-only
"""What the behaviours are written with: one backend of one server, and a few helpers."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest

from opendsec import BackendInfo, Client, NotSupported, OpendsecError, Sandbox, Snapshot
from tests.harness import Server

S = TypeVar("S")
T = TypeVar("T")
Mode = Literal["full", "filesystem"]

MEMORY_MB = 256
DISK_MB = 512
IMAGE_MEMORY_MB = 768
IMAGE_DISK_MB = 3_072
WAIT_S = 60.0
"""The most that anything which should happen soon may take; emulated guests are slow."""

OCI_DIR = Path("/var/tmp/opendsec-conformance-oci")
"""Where servers of the suite import images from."""

REFUSED = "refused"
"""Property of a test that saw the typed refusal of what its backend does not claim to do."""


@dataclass
class Bench:
    """One backend under test.

    Attributes:
        column: Its name in the table, such as ``microvm-qemu``.
        backend: Its name in the API.
        info: What the server says of it; ``info.capabilities`` decides what it must do.
        server: The instance that the suite runs itself; None: somebody else's, by URL.
        template: What sandboxes are made of, unless a test says otherwise.
        notes: What the running test says of itself.
    """

    column: str
    backend: str
    info: BackendInfo
    client: Client
    server: Server | None
    template: str = "base"
    notes: list[tuple[str, object]] = field(default_factory=list)

    @property
    def can(self) -> Any:
        """Its declared capabilities."""
        return self.info.capabilities

    @property
    def best_mode(self) -> Mode:
        """The most that a snapshot or fork can hold here."""
        return "full" if self.can.memory_snapshot else "filesystem"

    def create(self, **wanted: Any) -> Sandbox:
        """A small sandbox on this backend; snapshots fix sizes themselves."""
        sizes: dict[str, Any] = {}
        if "template" not in wanted:
            sizes = {"cpu": 1, "memory_mb": MEMORY_MB, "disk_mb": DISK_MB}
            if self.can.disk_images:  # another's init wants more, and the image has its size
                sizes = {"cpu": 1, "memory_mb": IMAGE_MEMORY_MB, "disk_mb": IMAGE_DISK_MB}
        return self.client.create(
            wanted.pop("template", self.template),
            **{"timeout_s": 1200, "backend": self.backend, **sizes, **wanted},
        )

    def refused(self, call: Callable[[], object]) -> None:
        """What the backend does not claim to do is refused properly: typed, with a way out."""
        with pytest.raises(NotSupported) as caught:
            call()
        assert caught.value.fault == "user"
        assert caught.value.remediation
        assert not caught.value.retryable
        self.notes.append((REFUSED, True))

    def own_machine(self) -> Server:
        """The instance, for what can only be done on its machine; skips for a foreign server."""
        if self.server is None:
            pytest.skip("needs the server's machine; the suite was given a URL")
        return self.server


@dataclass
class Maker:
    """Makes sandboxes of one test or module, and takes all of them away: forks, too, since
    children inherit labels, and snapshots of any of them."""

    bench: Bench
    label: str = field(default_factory=lambda: f"cf-{uuid.uuid4().hex[:12]}")
    sources: set[str] = field(default_factory=set)

    def __call__(self, **wanted: Any) -> Sandbox:
        sandbox = self.bench.create(**{"labels": [self.label], **wanted})
        self.sources.add(sandbox.sandbox_id)
        return sandbox

    def fork(self, source: Sandbox, count: int = 1, **wanted: Any) -> list[Sandbox]:
        """All children; the test fails with the error of any that was not made."""
        children: list[Sandbox] = []
        for child in source.fork(count, **{"mode": self.bench.best_mode, **wanted}):
            if isinstance(child, OpendsecError):
                raise child
            self.sources.add(child.sandbox_id)
            children.append(child)
        assert len(children) == count
        return children

    def snapshot(self, source: Sandbox, name: str | None = None, **wanted: Any) -> Snapshot:
        """A snapshot in the best mode, if none is asked for."""
        return source.snapshot(name, **{"mode": self.bench.best_mode, **wanted})

    def clean(self) -> None:
        """Take away everything."""
        for info in self.bench.client.list(labels=[self.label]):
            self.bench.client.kill(info.sandbox_id)
        for snapshot in list(self.bench.client.snapshots.list()):
            if snapshot.source_id in self.sources:
                self.bench.client.snapshots.delete(snapshot.snapshot_id)


def until(condition: Callable[[], T], what: str, *, seconds: float = WAIT_S) -> T:
    """Wait until something is true, and return it.

    Raises:
        AssertionError: it was not within ``seconds``.
    """
    end = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < end, what
        time.sleep(0.1)


def each(call: Callable[[S], object], items: Iterable[S]) -> list[object]:
    """``call`` with every item, all at one time; as ``at_once``."""
    return at_once([partial(call, item) for item in items])


def at_once(calls: Iterable[Callable[[], object]]) -> list[object]:
    """Run calls at one time; returns results or ``OpendsecError`` in their order."""
    todo = list(calls)
    with ThreadPoolExecutor(len(todo)) as pool:
        futures: list[Future[object]] = [pool.submit(call) for call in todo]
        found: list[object] = []
        for future in futures:
            try:
                found.append(future.result(timeout=300))
            except OpendsecError as exc:
                found.append(exc)
    return found


def state_is(sandbox: Sandbox, *states: str) -> Callable[[], bool]:
    """A condition for ``until``."""
    return lambda: sandbox.info().state in states


IDENTITY = r"""
import _random, _ssl, os
def text(path):
    try:
        return open(path).read().strip()
    except OSError:
        return ""
print("urandom:", os.urandom(16).hex())
print("kernel uuid:", text("/proc/sys/kernel/random/uuid"))
print("getrandom:", os.getrandom(16).hex())
print("ssl random:", _ssl.RAND_bytes(16).hex())
print("python random:", _random.Random().random())
print("hostname:", os.uname().nodename)
print("boot id:", text("/proc/sys/kernel/random/boot_id"))
print("machine id:", text("/etc/machine-id"))
"""
"""Imports as little as it can: emulated guests are slow."""


def status_of_url(url: str) -> int:
    """HTTP status of a plain GET without any key."""
    try:
        with urllib.request.urlopen(url, timeout=90) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as exc:
        with exc:
            return int(exc.code)


def identity(sandbox: Sandbox) -> dict[str, str]:
    """What must differ between any two sandboxes, as a new process inside sees it."""
    lines = sandbox.exec(["python3", "-ISc", IDENTITY], check=True).stdout.splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


SERVER = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
s = socket.create_server((sys.argv[1], int(sys.argv[2])), family=family, backlog=64)
body = b"from inside"
head = b"HTTP/1.1 200 OK\\r\\nConnection: close\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body)
while True:
    c, _ = s.accept()
    c.recv(65536)
    c.sendall(head + body)
    c.close()
"""


def serve(sandbox: Sandbox, port: int, bind: str = "127.0.0.1") -> None:
    """A web server inside, that answers everything with ``from inside``."""
    sandbox.spawn(["python3", "-ISc", SERVER, bind, str(port)]).disconnect()
    sandbox.wait_for_port(port, timeout_s=WAIT_S)


TICKER = "i=0; while true; do i=$((i+1)); echo $i > /tmp/ticks; sleep 0.1; done"
"""A process whose going on can be seen."""


def ticks(sandbox: Sandbox) -> int:
    """How far the ticker has come."""
    for _ in range(50):  # it may be between truncating and writing
        text = sandbox.exec(["cat", "/tmp/ticks"], check=True).stdout.strip()
        if text:
            return int(text)
        time.sleep(0.05)
    raise AssertionError("the ticker writes nothing")


def clock_error_s(sandbox: Sandbox) -> float:
    """How far the sandbox's wall clock is off, at least, in seconds."""
    before = time.time()
    inside = float(sandbox.exec(["date", "+%s.%N"], check=True).stdout)
    after = time.time()
    return max(0.0, before - inside, inside - after)
