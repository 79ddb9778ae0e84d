# SPDX-License-Identifier: AGPL-3.0-only
"""Registries that refuse, fail, stall and lie, and layers that mean harm: a typed error each, and
nothing half-made."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import subprocess
import tarfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from opendsec_server.contract.errors import (
    ImageDamaged,
    ImageNotFound,
    Internal,
    NodeFull,
    OpendsecError,
    RegistryDenied,
    RegistryLimited,
    RegistryUnavailable,
)
from opendsec_server.images import limits
from opendsec_server.images.references import parse
from opendsec_server.images.registry import Endpoint, _ask, probe, retry_after_s

from .conftest import World
from .registries import (
    Answer,
    Entry,
    FaultProxy,
    Registry,
    files,
    free_port,
    make_layout,
    sha256,
    tar_of,
)


def blob_of(layout: Path, at: int = 0) -> str:
    """Digest of a layout's layer, as it is sent."""
    manifest = json.loads((layout / "index.json").read_text())["manifests"][0]["digest"]
    found = json.loads((layout / "blobs/sha256" / manifest[7:]).read_text())
    return str(found["layers"][at]["digest"])


def assert_nothing_visible(world: World) -> None:
    """No image, and nothing half-made."""
    images = world.images()
    assert asyncio.run(images.all()) == []
    assert images.store.names() == {}
    folder = world.root / "images/pulls"
    assert not folder.is_dir() or not list(folder.iterdir())


@pytest.mark.parametrize(
    ("status", "headers", "kind"),
    [
        (401, {"WWW-Authenticate": 'Basic realm="x"'}, RegistryDenied),
        (403, {}, RegistryDenied),
        (404, {}, ImageNotFound),
        (500, {}, RegistryUnavailable),
        (503, {"Retry-After": "7"}, RegistryUnavailable),
    ],
)
def test_statuses(
    world: World,
    faults: FaultProxy,
    status: int,
    headers: dict[str, str],
    kind: type[OpendsecError],
) -> None:
    faults.fault = lambda answer: answer.path != "/v2/" and answer.refuse(status, headers)
    with pytest.raises(kind) as raised:
        asyncio.run(world.images().pull(f"{faults.host}/some/image:1"))
    assert type(raised.value) is kind
    if status == 503:
        assert raised.value.retry_after_s == 7
    # As often as it is tried, skopeo and we ask twice each at most.
    asked = [r for r in faults.requests if "/manifests/" in r]
    assert len(asked) <= 4 * limits.ATTEMPTS_MAX
    assert_nothing_visible(world)


def test_what_is_no_registry_is_not_quoted(world: World, faults: FaultProxy) -> None:
    def page(answer: Answer) -> bool:
        if answer.path == "/v2/":
            return False
        body = b"<html>internal page</html>"
        answer.send_response(418)
        answer.send_header("Content-Length", str(len(body)))
        answer.end_headers()
        answer.wfile.write(b"" if answer.command == "HEAD" else body)
        return True

    faults.fault = page
    with pytest.raises(RegistryUnavailable, match="418") as raised:
        asyncio.run(world.images().pull(f"{faults.host}/some/image:1"))
    assert "internal" not in raised.value.message


def test_too_many_requests(world: World, faults: FaultProxy) -> None:
    faults.fault = lambda answer: answer.refuse(429, {"Retry-After": "42"})
    with pytest.raises(RegistryLimited) as raised:
        asyncio.run(world.images().pull(f"{faults.host}/some/image:1"))
    assert raised.value.retry_after_s == 42
    assert raised.value.retryable


def test_too_many_requests_for_a_layer(
    world: World, registry: Registry, faults: FaultProxy, tmp_path: Path
) -> None:
    make_layout(tmp_path / "l", [files(a="1")])
    registry.push(tmp_path / "l", "limited:1")
    blob = blob_of(tmp_path / "l")
    said = False

    def limit(answer: Answer) -> bool:
        nonlocal said
        said = said or blob in answer.path
        return said and answer.refuse(429, {"Retry-After": "42"})

    faults.fault = limit
    with pytest.raises(RegistryLimited) as raised:
        asyncio.run(world.images(registry_stall_s=3).pull(f"{faults.host}/limited:1"))
    assert raised.value.retry_after_s == 42


@pytest.mark.parametrize(
    ("value", "wanted"),
    [("5", 5), (None, 60), ("soon", 60), ("-3", 1), ("999999999", 86_400),
     ("Mon, 01 Jan 2024 00:00:00 +99999999999999999999", 60)],
)  # fmt: skip
def test_retry_after(value: str | None, wanted: int) -> None:
    assert retry_after_s(value) == wanted


def test_retry_after_date() -> None:
    later = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 100))
    assert 90 <= retry_after_s(later) <= 101


READ = "everything was read"


def _endless(answer: Answer) -> None:
    answer.send_response(200)
    answer.end_headers()
    answer.close_connection = True
    with contextlib.suppress(OSError):
        for _ in range(256):
            answer.wfile.write(b" " * (1 << 20))
        answer.server.requests.append(READ)


def _words(body: bytes) -> Callable[[Answer], None]:
    def send(answer: Answer) -> None:
        answer.send_response(200)
        answer.send_header("Content-Length", str(len(body)))
        answer.end_headers()
        answer.wfile.write(body)

    return send


@pytest.mark.parametrize(
    "send",
    [_endless, _words(b"[]"), _words(b'{"token": 1}'), _words(b'{"a":' + b"[" * 500_000)],
    ids=["endless", "list", "number", "deep"],
)
async def test_token_server_that_means_harm(
    faults: FaultProxy, send: Callable[[Answer], None]
) -> None:
    def answer(at: Answer) -> bool:
        if at.path.startswith("/token"):
            send(at)
            return True
        challenge = f'Bearer realm="http://{faults.host}/token",service="s"'
        return at.refuse(401, {"WWW-Authenticate": challenge})

    faults.fault = answer
    error = await probe(Endpoint(faults.host, True), parse(f"{faults.host}/some/image:1"), None)
    assert type(error) is RegistryUnavailable
    assert any("/token" in asked for asked in faults.requests)
    assert READ not in faults.requests


async def test_question_to_the_registry_does_not_take_its_body(faults: FaultProxy) -> None:
    def answer(at: Answer) -> bool:
        _endless(at)
        return True

    faults.fault = answer
    reference = parse(f"{faults.host}/some/image:1")
    assert await probe(Endpoint(faults.host, True), reference, None, push=True) is None
    assert READ not in faults.requests


def test_challenge_of_many_words_is_read_in_no_time() -> None:
    """In time that grows with its square, this one would take hours."""

    class Client:
        asked = 0

        @contextlib.asynccontextmanager
        async def stream(self, *_: object, **__: object) -> AsyncIterator[httpx2.Response]:
            self.asked += 1
            yield httpx2.Response(
                401 if self.asked == 1 else 404,
                headers={"WWW-Authenticate": "Bearer " + "a" * 4_000_000},
            )

    client: Any = Client()
    assert asyncio.run(_ask(client, "http://h/v2/x", "s", None)).status_code == 404


def test_nobody_listens(world: World) -> None:
    with pytest.raises(RegistryUnavailable):
        asyncio.run(world.images().pull(f"127.0.0.1:{free_port()}/some/image:1"))
    assert_nothing_visible(world)


def test_passing_failure_is_retried(
    world: World, registry: Registry, faults: FaultProxy, tmp_path: Path
) -> None:
    make_layout(tmp_path / "l", [files(a="1")])
    registry.push(tmp_path / "l", "retry:1")
    left = [2]

    def fail_twice(answer: Answer) -> bool:
        if "/blobs/" not in answer.path or not left[0]:
            return False
        left[0] -= 1
        return answer.refuse(502)

    faults.fault = fail_twice
    assert asyncio.run(world.images().pull(f"{faults.host}/retry:1")).layers
    assert left == [0]


def spoil(blob: str, change: Callable[[bytes], bytes]) -> Callable[[Answer], bool]:
    """A fault: one blob comes changed."""

    def fault(answer: Answer) -> bool:
        if blob not in answer.path or answer.command != "GET":
            return False
        answer.forward(change)
        return True

    return fault


def test_registry_gone_in_the_middle(
    world: World, registry: Registry, faults: FaultProxy, tmp_path: Path
) -> None:
    make_layout(tmp_path / "l", [files(a="1"), tar_of([Entry("b", os.urandom(1 << 20))])])
    registry.push(tmp_path / "l", "cut:1")
    faults.fault = spoil(blob_of(tmp_path / "l", 1), lambda body: body[: len(body) // 2])
    images = world.images()
    with pytest.raises(RegistryUnavailable):
        asyncio.run(images.pull(f"{faults.host}/cut:1"))
    assert_nothing_visible(world)
    assert len(images.store.layers()) == 1, "the layer that was whole is kept"
    assert asyncio.run(images.prune()).layers == 0, "for a while"
    faults.fault = None
    faults.requests.clear()
    assert asyncio.run(images.pull(f"{faults.host}/cut:1")).layers
    assert blob_of(tmp_path / "l", 0) not in faults.blobs()


def test_layers_of_failed_pulls_go_when_room_is_made(
    world: World, registry: Registry, tmp_path: Path, monkeypatch: Any
) -> None:
    whole, broken = files(a="1"), files(b="2")
    make_layout(tmp_path / "l", [whole, broken], diff_ids=[sha256(whole), sha256(b"other")])
    images = world.images()
    with pytest.raises(ImageDamaged):
        asyncio.run(images.pull(registry.push(tmp_path / "l", "half:1")))
    images.store.adopt(tmp_path / "l/oci-layout", key=sha256(b"x"))
    monkeypatch.setattr(limits, "ORPHAN_LAYER_KEPT_S", -1.0)
    assert asyncio.run(images.prune()).layers >= 1
    assert images.store.layers() == []


def test_skopeo_that_cannot_start(world: World, monkeypatch: Any, tmp_path: Path) -> None:
    broken = tmp_path / "bin/skopeo"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho no such thing >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}:{os.environ['PATH']}")
    with pytest.raises(OpendsecError):
        asyncio.run(world.images().pull("127.0.0.1:1/x:1"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Internal, match="not installed"):
        asyncio.run(world.images().pull("127.0.0.1:1/x:1"))


def test_altered_bytes(
    world: World, registry: Registry, faults: FaultProxy, tmp_path: Path
) -> None:
    make_layout(tmp_path / "l", [tar_of([Entry("b", b"x" * 100_000)])])
    registry.push(tmp_path / "l", "altered:1")

    def alter(body: bytes) -> bytes:
        middle = len(body) // 2
        return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]

    faults.fault = spoil(blob_of(tmp_path / "l"), alter)
    with pytest.raises(ImageDamaged):
        asyncio.run(world.images().pull(f"{faults.host}/altered:1"))
    assert_nothing_visible(world)


def test_another_layer_than_was_asked_for(
    world: World, registry: Registry, faults: FaultProxy, tmp_path: Path
) -> None:
    make_layout(tmp_path / "l", [files(a="right")])
    registry.push(tmp_path / "l", "lying:1")
    other = gzip.compress(files(a="wrong"), 1, mtime=0)
    faults.fault = spoil(
        blob_of(tmp_path / "l"), lambda body: other[: len(body)].ljust(len(body), b"\0")
    )
    with pytest.raises(ImageDamaged):
        asyncio.run(world.images().pull(f"{faults.host}/lying:1"))
    assert_nothing_visible(world)


def test_manifest_of_another_digest(
    world: World, registry: Registry, faults: FaultProxy, tmp_path: Path
) -> None:
    digest = make_layout(tmp_path / "l", [files(a="1")])
    registry.push(tmp_path / "l", "manifest:1")

    def alter(answer: Answer) -> bool:
        if "/manifests/" not in answer.path or answer.command != "GET":
            return False
        answer.forward(lambda body: body[:-1] + b" ")
        return True

    faults.fault = alter
    with pytest.raises(OpendsecError) as raised:
        asyncio.run(world.images().pull(f"{faults.host}/manifest@{digest}"))
    assert isinstance(raised.value, ImageDamaged)
    assert_nothing_visible(world)


def test_diff_id_that_is_wrong(world: World, registry: Registry, tmp_path: Path) -> None:
    make_layout(tmp_path / "l", [files(a="1")], diff_ids=[sha256(b"something else")])
    with pytest.raises(ImageDamaged):
        asyncio.run(world.images().pull(registry.push(tmp_path / "l", "diff:1")))
    assert_nothing_visible(world)


def test_slow_registry(
    world: World, registry: Registry, faults: FaultProxy, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(limits, "ATTEMPTS_MAX", 1)
    make_layout(tmp_path / "l", [tar_of([Entry("b", os.urandom(1 << 20))])])
    registry.push(tmp_path / "l", "slow:1")
    blob = blob_of(tmp_path / "l")

    def trickle(answer: Answer) -> bool:
        if blob not in answer.path or answer.command != "GET":
            return False

        def wait(body: bytes) -> bytes:
            answer.wfile.write(body[:1000])
            answer.wfile.flush()
            time.sleep(8)
            return b""

        answer.forward(wait)
        return True

    faults.fault = trickle
    with pytest.raises(RegistryUnavailable, match="slow"):
        asyncio.run(world.images(registry_stall_s=1.5).pull(f"{faults.host}/slow:1"))
    assert_nothing_visible(world)


def test_something_that_is_no_image(world: World, registry: Registry, tmp_path: Path) -> None:
    make_layout(tmp_path / "l", [files(a="1")], diff_ids=[sha256(b"a"), sha256(b"b")])
    with pytest.raises(ImageDamaged, match="1 layers"):
        asyncio.run(world.images().pull(registry.push(tmp_path / "l", "odd:1")))
    make_layout(tmp_path / "m", [files(a="1")], {"Env": "not a list"})
    with pytest.raises(ImageDamaged):
        asyncio.run(world.images().pull(registry.push(tmp_path / "m", "odd:2")))
    make_layout(tmp_path / "n", [files(a="1")], {"Env": ["A=\0"]})
    with pytest.raises(ImageDamaged, match="null"):
        asyncio.run(world.images().pull(registry.push(tmp_path / "n", "odd:3")))
    assert_nothing_visible(world)


@pytest.mark.parametrize(
    "entries",
    [
        pytest.param([Entry("../escaped", b"x")], id="parent"),
        pytest.param([Entry("a/../../escaped", b"x")], id="parent-within"),
        pytest.param(
            [Entry("h", kind=tarfile.LNKTYPE, link="../../../../etc/passwd")], id="hard-link"
        ),
    ],
)
def test_hostile_layers(
    world: World, registry: Registry, tmp_path: Path, entries: list[Entry]
) -> None:
    make_layout(tmp_path / "l", [tar_of(entries)])
    with pytest.raises(ImageDamaged):
        asyncio.run(world.images().pull(registry.push(tmp_path / "l", "hostile:1")))
    assert not list(tmp_path.rglob("escaped"))
    assert_nothing_visible(world)


def test_links_lead_nowhere_outside(world: World, registry: Registry, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    entries = [
        Entry("dir", kind=tarfile.SYMTYPE, link=str(outside)),
        Entry("dir/written", b"x"),
        Entry("/absolute", b"x"),
        Entry("up", kind=tarfile.SYMTYPE, link="../../../../../../../.."),
        Entry(f"up{outside}/written", b"x"),
    ]
    make_layout(tmp_path / "l", [tar_of(entries)])
    images = world.images()
    try:
        info = asyncio.run(images.pull(registry.push(tmp_path / "l", "links:1")))
    except ImageDamaged:
        assert_nothing_visible(world)
    else:
        assert "absolute" in world.tree(images, info.digest)
    assert list(outside.iterdir()) == []


def test_layer_that_is_no_archive(world: World, registry: Registry, tmp_path: Path) -> None:
    make_layout(tmp_path / "l", [os.urandom(100_000)])
    with pytest.raises(ImageDamaged):
        asyncio.run(world.images().pull(registry.push(tmp_path / "l", "noise:1")))
    assert_nothing_visible(world)


def test_layer_that_swells(world: World, registry: Registry, tmp_path: Path) -> None:
    make_layout(tmp_path / "l", [tar_of([Entry("zeros", bytes(64 << 20))])])
    reference = registry.push(tmp_path / "l", "bomb:1")
    with pytest.raises(NodeFull, match="limit"):
        asyncio.run(world.images(image_size_max_mb=16).pull(reference))
    assert_nothing_visible(world)
    assert asyncio.run(world.images(image_size_max_mb=100).pull(reference)).layers


@contextlib.contextmanager
def memory_at(path: Path, size: str) -> Iterator[None]:
    """A file system in memory."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


@pytest.mark.timeout(300)
def test_two_hundred_thousand_files(world: World, registry: Registry, tmp_path: Path) -> None:
    entries = [Entry(f"d/{number:06}") for number in range(200_000)]
    make_layout(tmp_path / "l", [tar_of(entries)])
    reference = registry.push(tmp_path / "l", "crowd:1")
    world.root = tmp_path / "memory"
    with memory_at(world.root, "3g"):
        images = world.images()
        info = asyncio.run(images.pull(reference))
        assert world.count(images, info.digest, "d") == 200_000


def test_disk_full(world: World, registry: Registry, tmp_path: Path, monkeypatch: Any) -> None:
    make_layout(tmp_path / "l", [tar_of([Entry("b", os.urandom(12 << 20))])])
    reference = registry.push(tmp_path / "l", "full:1")
    world.root = tmp_path / "small"
    with memory_at(world.root, "8m"):
        with pytest.raises(NodeFull, match="disk"):
            asyncio.run(world.images().pull(reference))
        # As well when it was not seen beforehand.
        monkeypatch.setattr(limits, "DISK_FREE_FLOOR_BYTES", -(1 << 30))
        with pytest.raises(NodeFull, match="disk"):
            asyncio.run(world.images().pull(reference))
        assert_nothing_visible(world)
