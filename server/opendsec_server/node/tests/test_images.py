# SPDX-License-Identifier: AGPL-3.0-only
"""Containers of small, strange and layered images, and images packed of containers."""

from __future__ import annotations

from typing import Any

import pytest

from opendsec_server.contract.images import ImageConfig

from .conftest import MakeNode
from .layered import OPAQUE, WHITEOUT, Tree, busybox, make_image, store_of
from .machine import CallError, NodeProcess
from .test_exec import run
from .test_restart import again

pytestmark = pytest.mark.node

ROOT = {"default_user": "root", "default_workdir": "/"}


async def sh(node: NodeProcess, spec: Any, script: str, **options: Any) -> str:
    done = await run(node, spec, "sh", "-c", script, **options)
    assert done["exit_code"] == 0, done
    return str(done["stdout"].decode())


async def test_a_shell_and_nothing_else(node: NodeProcess) -> None:
    image = await make_image(store_of(node.config), busybox())
    spec = await node.create(image=image.digest, **ROOT)
    assert await sh(node, spec, "echo $((6 * 7)); id -u; pwd") == "42\n0\n/\n"
    assert "nameserver" in await sh(node, spec, "cat /etc/resolv.conf; touch /file")


async def test_no_shell_at_all(node: NodeProcess) -> None:
    tree: Tree = {"busybox": busybox()["bin/busybox"]}
    image = await make_image(store_of(node.config), tree)
    spec = await node.create(image=image.digest, **ROOT)
    done = await run(node, spec, "/busybox", "echo", "from scratch")
    assert done["stdout"] == b"from scratch\n"
    with pytest.raises(CallError) as error:
        await run(node, spec, "/bin/sh", "-c", "true")
    assert error.value.code == "invalid_request"
    assert "/bin/sh" in str(error.value)


async def test_layers_in_their_order(node: NodeProcess) -> None:
    image = await make_image(
        store_of(node.config),
        busybox() | {"data/a": "a1", "data/b": "b1", "data/sub/x": "x1", "gone/y": "y1"},
        {"data/a": "a2", "data/b": WHITEOUT, "data/sub": OPAQUE, "data/sub/z": "z2"},
        {"gone": WHITEOUT, "data/c": "c3", "n" * 254 + "/file": "long"},
    )
    spec = await node.create(image=image.digest, **ROOT)
    script = "cd /data; ls -A; cat a c sub/z; ls sub; ls / | grep -c gone; cat /nn*/file"
    assert await sh(node, spec, script + "; true") == "a\nc\nsub\na2c3z2z\n0\nlong"


@pytest.mark.parametrize("user_namespaces", ["auto", "off"])
async def test_sixty_four_layers(make_node: MakeNode, user_namespaces: str) -> None:
    node = make_node(user_namespaces=user_namespaces)
    await node.start()
    store = store_of(node.config)
    trees: list[Tree] = [{"top": str(n), f"files/{n}": "x"} for n in range(63)]
    image = await make_image(store, busybox(), *trees)
    assert len(image.layers) == 64
    spec = await node.create(image=image.digest, **ROOT)
    assert await sh(node, spec, "cat /top; ls /files | grep -c .") == "62" + "63\n"
    more = await make_image(store, {"top": "63"})
    composed = await node.call("compose", [image.digest, more.digest])
    assert len(composed["layers"]) <= 64
    spec = await node.create(image=composed["digest"], **ROOT)
    assert await sh(node, spec, "cat /top; ls /files | grep -c .") == "63" + "63\n"


async def test_an_image_that_is_not_there(node: NodeProcess) -> None:
    for name in ("sha256:" + "0" * 64, "no-such", "../../etc", ""):
        with pytest.raises(CallError) as error:
            await node.create(image=name)
        assert error.value.code == "template_not_found", name


async def test_what_is_in_use_stays(node: NodeProcess) -> None:
    image = await make_image(store_of(node.config), busybox())
    spec = await node.create(image=image.digest, **ROOT)
    with pytest.raises(CallError) as error:
        await node.call("remove_image", image.digest)
    assert error.value.code == "image_in_use"
    await node.call("kill", spec.sandbox_id)
    await node.call("remove_image", image.digest)
    assert not store_of(node.config).has_layer(image.layers[0])


# --- packing ------------------------------------------------------------------


async def pack(node: NodeProcess, spec: Any, **options: Any) -> dict[str, Any]:
    image: dict[str, Any] = await node.call("pack", spec.sandbox_id, options)
    return image


async def test_pack_and_start_from_it(node: NodeProcess) -> None:
    config = ImageConfig(env={"A": "1"}, workdir="/data")
    base = await make_image(
        store_of(node.config),
        busybox() | {"data/old": "old", "data/gone": "gone", "data/.bash_history": "token"},
        config=config,
    )
    spec = await node.create(image=base.digest, **ROOT)
    await sh(
        node,
        spec,
        "rm /data/gone /data/.bash_history; echo new > /data/new;"
        "echo changed > /data/old; mkdir -p /home/u /root;"
        "touch /root/.bash_history /home/u/.python_history /home/u/kept; echo me > /etc/mine;"
        "echo x > /run/gone",
    )
    packed = await pack(node, spec, name="mine")
    assert packed["layers"][:-1] == list(base.layers)
    assert packed["names"] == ["mine"]
    assert packed["config"]["env"] == {"A": "1"}
    assert await sh(node, spec, "cat /data/new") == "new\n", "it goes on"
    child = await node.create(image="mine", **ROOT)
    seen = await sh(node, child, "cd /data; ls -A; cat old new; ls -A /root /home/u; ls /etc /run")
    assert seen == (
        "new\nold\nchanged\nnew\n/home/u:\nkept\n\n/root:\n"
        "/etc:\nhostname\nhosts\nmine\nresolv.conf\n\n/run:\ne2b\n"
    ), seen
    assert child.sandbox_id in await sh(node, child, "cat /etc/hostname /etc/hosts")
    again_packed = await pack(node, child)
    assert again_packed["layers"] == packed["layers"], "nothing has changed"


async def test_pack_squashed_unscrubbed_paused_and_configured(node: NodeProcess) -> None:
    base = await make_image(store_of(node.config), busybox(), {"old": "old"}, {"gone": "gone"})
    spec = await node.create(image=base.digest, **ROOT)
    await sh(node, spec, "rm /gone; mkdir /root; echo secret > /root/.ash_history")
    await node.call("pause", spec.sandbox_id)
    packed = await pack(
        node, spec, squash=True, scrub=False, config={"user": "root", "cmd": ["sh"]}
    )
    assert len(packed["layers"]) == 1
    assert packed["config"]["cmd"] == ["sh"]
    assert await node.state(spec.sandbox_id) == "paused"
    child = await node.create(image=packed["digest"], **ROOT)
    assert await sh(node, child, "cat /old /root/.ash_history; ls / | grep gone; true") == (
        "oldsecret\n"
    )


async def test_a_hostile_tree_is_packed_as_it_is(node: NodeProcess) -> None:
    spec = await node.create(default_user="root")
    await sh(
        node,
        spec,
        "mkdir -p /a && cd /a && ln -s /etc/shadow link && ln -s / root && mkfifo pipe &&"
        "ln -s ../../../../etc up && touch \"$(printf 'new\\nline')\" && touch x && ln x y &&"
        "python3 -c 'open(chr(255)*80, \"w\")' && setfattr -n user.k -v v x 2>/dev/null;"
        "mv /etc/hosts /etc/gone; ln -s /etc/passwd /etc/hosts",
    )
    packed = await pack(node, spec)
    child = await node.create(image=packed["digest"])
    seen = await sh(
        node,
        child,
        "cd /a; readlink link root up; stat -c %F pipe; stat -c %h x; ls | wc -l;"
        "readlink /etc/hosts; cat /etc/hosts | head -n1",
    )
    assert seen == ("/etc/shadow\n/\n../../../../etc\nfifo\n2\n9\n127.0.0.1\tlocalhost\n"), seen


async def test_a_file_of_holes_is_not_packed(node: NodeProcess) -> None:
    spec = await node.create(default_user="root")
    await sh(node, spec, "truncate -s 1T /hole; mkdir /kept")
    with pytest.raises(CallError, match="bytes of files") as error:
        await pack(node, spec)
    assert error.value.code == "node_full"
    assert await sh(node, spec, "rm /hole; echo on") == "on\n"
    packed = await pack(node, spec)
    child = await node.create(image=packed["digest"])
    assert await sh(node, child, "ls -d /kept") == "/kept\n"


@pytest.mark.parametrize("point", ["pack:copied", "pack:layer", "snapshot:made"])
async def test_killed_while_packing(make_node: MakeNode, point: str) -> None:
    node = make_node()
    await node.start(OPENDSEC_CRASH_AT=point)
    spec = await node.create()
    await node.exec(spec, "echo kept > ~/file")
    before = set(store_of(node.config).layers())
    with pytest.raises(ConnectionError):
        await pack(node, spec)
    await node.wait()
    await again(node)
    assert await node.state(spec.sandbox_id) == "running"
    store = store_of(node.config)
    assert set(store.layers()) == before
    assert not list((store.root / "pulls").glob("*"))
    assert not list((node.config.state_path / "pool/snapshots").iterdir())
    packed = await pack(node, spec)
    child = await node.create(image=packed["digest"])
    assert (await node.exec(child, "cat ~/file"))[1] == "kept\n"


async def test_what_cannot_be_a_layer_leaves_nothing(node: NodeProcess) -> None:
    spec = await node.create()
    layers = set(store_of(node.config).layers())
    await node.exec(spec, "touch /tmp/$(printf 'n%.0s' $(seq 255)); echo kept > ~/file")
    try:
        await pack(node, spec)  # newer tools can
    except CallError as error:
        assert error.code == "snapshot_failed"
        store = store_of(node.config)
        assert set(store.layers()) == layers
        assert not list((store.root / "pulls").iterdir())
    assert not list((node.config.state_path / "pool/snapshots").iterdir())
    assert (await node.exec(spec, "cat ~/file"))[1] == "kept\n"


async def test_pack_of_what_is_not_there(node: NodeProcess) -> None:
    spec = await node.create()
    await node.call("kill", spec.sandbox_id)
    with pytest.raises(CallError) as error:
        await pack(node, spec)
    assert error.value.code == "sandbox_not_found"
