# SPDX-License-Identifier: AGPL-3.0-only
"""Sandboxes of images whose data lies on a store."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from opendsec_server.binaries import find_lazy
from opendsec_server.config import ConfigError
from opendsec_server.images import lazy
from opendsec_server.images.tests.lazy_store import LazyStore, lazy_store
from opendsec_server.node.storage.lazy import LazyStatus
from opendsec_server.node.vmm.qemu.program import find_qemu

from .conftest import MakeNode
from .layered import Tree, busybox, make_image, store_of
from .machine import CallError, NodeProcess
from .test_exec import run
from .test_images import ROOT, sh
from .test_restart import again

pytestmark = pytest.mark.node

CHUNK = 16 << 10
WAITS = {"request_s": 2.0, "read_s": 2.0, "lost_read_s": 0.5, "trace_s": 1.0}
"""Shorter than the program's own, so that a test need not wait for half a minute."""


@pytest.fixture(autouse=True)
def _program() -> None:
    try:
        find_lazy()
    except ConfigError as exc:
        pytest.skip(str(exc))


@pytest.fixture
def web(scratch: Path) -> Iterator[LazyStore]:
    (scratch / "store").mkdir()
    with lazy_store(scratch / "store") as store:
        yield store


def noise() -> bytes:
    """A megabyte that does not compress: files lie where they lie."""
    return os.urandom(1 << 20)


async def published(node: NodeProcess, web: LazyStore, *trees: Tree) -> list[Path]:
    """Publish an image of the node, and have it forgotten there; its layers' files."""
    store = store_of(node.config)
    image = await make_image(store, *trees)
    await asyncio.to_thread(lazy.publish, store, image, web.root, chunk_bytes=CHUNK)
    await asyncio.to_thread(store.remove, [image.digest])
    return sorted((web.root / "layers").glob("*.erofs"))


async def attached(node: NodeProcess, reference: str) -> str:
    """Its digest."""
    image = await node.call("pull", reference)
    store = store_of(node.config)
    for layer in image["layers"]:
        path = store.layer_dir(layer) / "remote.json"
        if path.exists():
            path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | WAITS))
    return str(image["digest"])


def statuses(node: NodeProcess) -> list[LazyStatus]:
    """Of all layers that are served."""
    found = []
    for path in (node.config.state_path / "images/layers").glob("*/served/status"):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=LazyStatus))
        except (OSError, msgspec.MsgspecError):
            continue
    return found


def status(node: NodeProcess) -> LazyStatus:
    """Of the only layer that is served."""
    (path,) = (node.config.state_path / "images/layers").glob("*/served/status")
    return msgspec.json.decode(path.read_bytes(), type=LazyStatus)


async def eventually(what: Any) -> Any:
    """Wait until it is true."""
    for _ in range(600):
        if value := what():
            return value
        await asyncio.sleep(0.05)
    raise AssertionError("it did not come true")


@pytest.fixture
async def lazy_node(make_node: MakeNode, web: LazyStore) -> NodeProcess:
    node = make_node(lazy_sources=[web.url, str(web.root)])
    await node.start()
    assert node.config_error is None
    return node


async def test_from_a_directory(lazy_node: NodeProcess, web: LazyStore) -> None:
    await published(lazy_node, web, busybox() | {"data/noise": noise()}, {"top": "two layers"})
    digest = await attached(lazy_node, f"lazy+dir:{web.root}")
    spec = await lazy_node.create(image=digest, **ROOT)
    assert await sh(lazy_node, spec, "cat /top") == "two layers"


async def test_only_what_is_read_is_fetched(lazy_node: NodeProcess, web: LazyStore) -> None:
    content = noise()
    (file,) = await published(
        lazy_node, web, busybox() | {"data/noise": content, "data/unread": noise() * 2}
    )
    digest = await attached(lazy_node, f"lazy+{web.url}")
    assert web.ranges == []
    spec = await lazy_node.create(image=digest, **ROOT)
    await sh(lazy_node, spec, "true")
    before = status(lazy_node)
    assert 0 < before.bytes_fetched < file.stat().st_size / 2
    both = await asyncio.gather(
        *(sh(lazy_node, spec, "head -c 100000 /data/noise | cat | ls -l") for _ in range(2))
    )
    assert len(both) == 2
    got = await run(lazy_node, spec, "cat", "/data/noise")
    assert got["stdout"] == content
    after = status(lazy_node)
    # No chunk twice: neither for the two at once nor for who reads it again.
    assert after.bytes_fetched == sum(last + 1 - first for _, first, last in web.ranges)
    assert after.chunks_fetched == after.chunks_cached
    assert len({first for _, first, _ in web.ranges}) == len(web.ranges)


async def test_a_lost_store(lazy_node: NodeProcess, web: LazyStore) -> None:
    await published(lazy_node, web, busybox() | {"data/noise": noise(), "data/seen": "seen"})
    spec = await lazy_node.create(image=await attached(lazy_node, f"lazy+{web.url}"), **ROOT)
    assert await sh(lazy_node, spec, "cat /data/seen") == "seen"
    web.down()
    done = await run(lazy_node, spec, "cat", "/data/noise")
    assert done["exit_code"] != 0
    assert b"Input/output error" in done["stderr"]
    assert await sh(lazy_node, spec, "cat /data/seen") == "seen"

    async def message() -> str:
        return str((await lazy_node.call("get", spec.sandbox_id))["message"])

    for _ in range(100):
        if "store" in await message():
            break
        await asyncio.sleep(0.1)
    assert "is lost since" in await message()
    assert status(lazy_node).reads_failed > 0
    web.fault = None
    web.up()
    await eventually(lambda: status(lazy_node).lost_since is None)
    done = await run(lazy_node, spec, "cat", "/data/noise")
    assert (done["exit_code"], len(done["stdout"])) == (0, 1 << 20)


@pytest.mark.parametrize("fault", ["altered", "short", "error", "no-ranges"])
async def test_a_store_that_misbehaves(lazy_node: NodeProcess, web: LazyStore, fault: str) -> None:
    content = noise()
    await published(lazy_node, web, busybox() | {"data/noise": content})
    spec = await lazy_node.create(image=await attached(lazy_node, f"lazy+{web.url}"), **ROOT)
    await sh(lazy_node, spec, "true")
    web.fault = fault
    done = await run(lazy_node, spec, "cat", "/data/noise")
    assert done["exit_code"] != 0
    # What came is right all the same.
    assert content.startswith(done["stdout"])
    seen = status(lazy_node)
    assert seen.errors > 0
    assert (seen.altered > 0) == (fault == "altered")
    web.fault = None
    await eventually(lambda: status(lazy_node).lost_since is None)
    assert (await run(lazy_node, spec, "cat", "/data/noise"))["stdout"] == content


async def test_the_program_is_killed(lazy_node: NodeProcess, web: LazyStore) -> None:
    content = noise()
    await published(lazy_node, web, busybox() | {"data/noise": content})
    spec = await lazy_node.create(image=await attached(lazy_node, f"lazy+{web.url}"), **ROOT)
    await sh(lazy_node, spec, "true")
    first = status(lazy_node)
    os.kill(first.pid, signal.SIGKILL)

    def is_back() -> bool:
        try:
            return status(lazy_node).pid != first.pid
        except (OSError, ValueError):
            return False

    await eventually(is_back)
    done = await run(lazy_node, spec, "cat", "/data/noise")
    for _ in range(50):  # until the device has the new file
        if done["exit_code"] == 0:
            break
        await asyncio.sleep(0.1)
        done = await run(lazy_node, spec, "cat", "/data/noise")
    assert done["stdout"] == content
    # What the first one fetched is not fetched again.
    after = status(lazy_node)
    assert after.bytes_fetched + first.bytes_fetched <= after.size_bytes


async def test_the_daemon_is_killed(lazy_node: NodeProcess, web: LazyStore) -> None:
    content = noise()
    await published(lazy_node, web, busybox() | {"data/noise": content})
    digest = await attached(lazy_node, f"lazy+{web.url}")
    spec = await lazy_node.create(image=digest, **ROOT)
    await sh(lazy_node, spec, "true")
    first = status(lazy_node)
    await lazy_node.kill9()
    await again(lazy_node)
    assert status(lazy_node).pid == first.pid
    assert (await run(lazy_node, spec, "cat", "/data/noise"))["stdout"] == content
    # The one that came later watches it as well.
    os.kill(first.pid, signal.SIGKILL)
    other = await lazy_node.create(image=digest, **ROOT)
    assert await sh(lazy_node, other, "echo up") == "up\n"


async def test_removed_with_its_image(lazy_node: NodeProcess, web: LazyStore) -> None:
    await published(lazy_node, web, busybox())
    digest = await attached(lazy_node, f"lazy+{web.url}")
    spec = await lazy_node.create(image=digest, **ROOT)
    pid = status(lazy_node).pid
    with pytest.raises(CallError):
        await lazy_node.call("remove_image", digest)
    await lazy_node.call("kill", spec.sandbox_id)
    await lazy_node.call("remove_image", digest)
    assert not Path(f"/proc/{pid}").exists()
    assert not list((lazy_node.config.state_path / "images/layers").glob("*/served"))


async def test_a_recorded_start_is_fetched_ahead(lazy_node: NodeProcess, web: LazyStore) -> None:
    await published(lazy_node, web, busybox() | {"data/noise": noise()})
    digest = await attached(lazy_node, f"lazy+{web.url}")
    spec = await lazy_node.create(image=digest, **ROOT)
    await sh(lazy_node, spec, "head -c 400000 /data/noise | cat > /dev/null")
    store = store_of(lazy_node.config)
    (layer,) = store.find(digest).layers
    await eventually((store.layer_dir(layer) / "trace").exists)
    assert lazy.publish_traces(store, store.find(digest), web.root) == 1
    await lazy_node.call("kill", spec.sandbox_id)
    await lazy_node.call("remove_image", digest)
    digest = await attached(lazy_node, f"lazy+{web.url}")
    spec = await lazy_node.create(image=digest, **ROOT)
    await eventually(lambda: status(lazy_node).chunks_prefetched * CHUNK >= 350_000)
    await sh(lazy_node, spec, "head -c 400000 /data/noise | cat > /dev/null")


async def test_stores_that_may_not_be_used(lazy_node: NodeProcess, web: LazyStore) -> None:
    for reference in (
        "lazy+http://127.0.0.1:1/x",
        "lazy+dir:/etc",
        f"lazy+dir:{web.root}/../..",
        f"lazy+{web.url.replace('0.0.1', '0.0.11')}/",
        f"lazy+{web.url}/../x",
    ):
        with pytest.raises(CallError) as error:
            await lazy_node.call("pull", reference)
        assert error.value.code == "forbidden", reference
    for reference in ("lazy+ftp://x/y", "lazy+dir:x", "lazy+", "lazy+http://u:p@h/x"):
        with pytest.raises(CallError) as error:
            await lazy_node.call("pull", reference)
        assert error.value.code == "invalid_request", reference


async def test_a_microvm(lazy_node: NodeProcess, web: LazyStore) -> None:
    try:
        find_qemu(None)
    except ConfigError as exc:
        pytest.skip(f"no microVMs: {exc}")
    content = noise()
    await published(lazy_node, web, busybox() | {"data/noise": content}, {"top": "two layers"})
    digest = await attached(lazy_node, f"lazy+{web.url}")
    spec = await lazy_node.create(
        image=digest, backend="microvm", memory_mb=256, disk_mb=512, **ROOT
    )
    assert await sh(lazy_node, spec, "cat /top") == "two layers"
    pids = [seen.pid for seen in statuses(lazy_node)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)

    def are_back() -> bool:
        now = {seen.pid for seen in statuses(lazy_node)}
        return len(now) == len(pids) and not now & set(pids)

    await eventually(are_back)
    for _ in range(50):
        done = await run(lazy_node, spec, "cat", "/data/noise")
        if done["exit_code"] == 0:
            break
        await asyncio.sleep(0.2)
    assert done["stdout"] == content


async def test_merged_before_it_was_used(lazy_node: NodeProcess, web: LazyStore) -> None:
    await published(lazy_node, web, busybox() | {"top": "remote"})
    digest = await attached(lazy_node, f"lazy+{web.url}")
    trees: list[Tree] = [{f"files/{n}": "x"} for n in range(64)]
    more = await make_image(store_of(lazy_node.config), *trees)
    composed = await lazy_node.call("compose", [digest, more.digest])
    assert len(composed["layers"]) <= 64
    assert composed["on_demand_bytes"] == 0
    spec = await lazy_node.create(image=composed["digest"], **ROOT)
    assert await sh(lazy_node, spec, "cat /top; ls /files | grep -c .") == "remote64\n"
