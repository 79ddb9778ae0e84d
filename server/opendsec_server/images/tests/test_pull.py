# SPDX-License-Identifier: AGPL-3.0-only
"""Pulls from a real registry: what comes out, once for all, and again after a failure."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Literal

import pytest

from opendsec_server.contract.errors import (
    Forbidden,
    ImageInUse,
    ImageNotFound,
    InvalidRequest,
    NodeFull,
    OpendsecError,
    RegistryDenied,
)
from opendsec_server.contract.images import RegistryAuth

from .conftest import World
from .registries import (
    PASSWORD,
    USER,
    Entry,
    FaultProxy,
    Registry,
    files,
    make_layout,
    make_multi_layout,
    tar_of,
)

_PULL_SCRIPT = """
import asyncio, sys
from opendsec_server.config import Config
from opendsec_server.images.store import ImageStore
from opendsec_server.node.images import Images
from pathlib import Path
config = Config(state_dir=sys.argv[1])
images = Images(ImageStore(Path(sys.argv[1]) / "images"), config, set, lambda _layer: None)
asyncio.run(images.pull(sys.argv[2]))
"""


def pulls_left(world: World) -> list[Path]:
    """Half-made things."""
    folder = world.root / "images/pulls"
    return list(folder.iterdir()) if folder.is_dir() else []


def test_layers_become_one_tree(world: World, registry: Registry, tmp_path: Path) -> None:
    lower = tar_of(
        [
            Entry("keep/", kind=tarfile.DIRTYPE, mode=0o755),
            Entry("keep/a", b"old"),
            Entry("keep/gone", b"x"),
            Entry("opaque/", kind=tarfile.DIRTYPE, mode=0o750),
            Entry("opaque/hidden", b"x"),
            Entry("bin/tool", b"#!", mode=0o4755),
            Entry("bin/same", kind=tarfile.LNKTYPE, link="bin/tool"),
            Entry("link", kind=tarfile.SYMTYPE, link="/etc/passwd"),
            Entry("null", kind=tarfile.CHRTYPE, device=(1, 3), mode=0o666),
            Entry("fifo", kind=tarfile.FIFOTYPE),
            Entry("owned", b"x", uid=12345),
            Entry("n" * 200 + "/" + "m" * 200, b"long"),
            Entry("capable", b"x", headers={"SCHILY.xattr.user.note": "kept"}),
        ]
    )
    upper = tar_of(
        [
            Entry("keep/a", b"new"),
            Entry("keep/.wh.gone"),
            Entry("opaque/.wh..wh..opq"),
            Entry("opaque/fresh", b"x"),
        ]
    )
    make_layout(
        tmp_path / "l",
        [lower, upper],
        {
            "Env": ["PATH=/bin", "EMPTY=", "nonsense"],
            "Entrypoint": ["/bin/tool"],
            "Cmd": ["-x"],
            "WorkingDir": "/srv",
            "User": "1000:1000",
            "ExposedPorts": {"80/tcp": {}},
            "StopSignal": "SIGINT",
            "Labels": {"a": "b"},
        },
    )
    images = world.images()
    info = asyncio.run(images.pull(registry.push(tmp_path / "l", "team/tree:1")))
    assert info.names == (f"{registry.host}/team/tree:1",)
    assert len(info.layers) == 2
    assert info.config.env == {"PATH": "/bin", "EMPTY": ""}
    assert (info.config.entrypoint, info.config.cmd) == (("/bin/tool",), ("-x",))
    assert (info.config.workdir, info.config.user) == ("/srv", "1000:1000")
    assert (info.config.exposed_ports, info.config.stop_signal) == (("80/tcp",), "SIGINT")
    assert info.config.labels == {"a": "b"}
    texts, tree = world.texts(images, info.digest), world.tree(images, info.digest)
    assert texts["keep/a"] == "new"
    assert "keep/gone" not in tree
    assert {name for name in tree if name.startswith("opaque/")} == {"opaque/fresh"}
    assert not [name for name in tree if ".wh." in name]
    assert tree["bin/tool"].mode == 0o4755
    assert {tree["bin/tool"].islnk(), tree["bin/same"].islnk()} == {True, False}
    assert tree["link"].linkname == "/etc/passwd"
    assert (tree["null"].ischr(), tree["null"].devmajor, tree["null"].devminor) == (True, 1, 3)
    assert tree["fifo"].isfifo()
    assert tree["owned"].uid == 12345
    assert texts["n" * 200 + "/" + "m" * 200] == "long"
    assert tree["capable"].pax_headers["SCHILY.xattr.user.note"] == "kept"
    assert tree["keep/a"].mtime == 1000
    assert not pulls_left(world)


@pytest.mark.parametrize("compress", ["gzip", "zstd", ""])
@pytest.mark.parametrize("form", ["oci", "v2s2"])
def test_forms_of_images(
    world: World,
    registry: Registry,
    tmp_path: Path,
    compress: Literal["gzip", "zstd", ""],
    form: str,
) -> None:
    if (compress, form) == ("zstd", "v2s2"):
        pytest.skip("docker's own form has no zstd")
    make_layout(tmp_path / "l", [files(a="1")], {"Env": ["A=1"]}, compress=compress)
    reference = registry.push(tmp_path / "l", f"form/{form}:{compress or 'none'}", "--format", form)
    images = world.images()
    info = asyncio.run(images.pull(reference))
    assert (world.texts(images, info.digest), info.config.env) == ({"a": "1"}, {"A": "1"})


def test_same_layers_are_kept_and_sent_once(
    world: World, registry: Registry, faults: FaultProxy, tmp_path: Path
) -> None:
    shared = files(shared="s")
    make_layout(tmp_path / "one", [shared, files(one="1")])
    make_layout(tmp_path / "two", [shared, files(two="2")])
    for name in ("one", "two"):
        registry.push(tmp_path / name, f"share/{name}:1")
    images = world.images()
    one = asyncio.run(images.pull(f"{faults.host}/share/one:1"))
    asked = len(faults.blobs())
    two = asyncio.run(images.pull(f"{faults.host}/share/two:1"))
    assert one.layers[0] == two.layers[0]
    assert len(images.store.layers()) == 3
    assert len(faults.blobs()) == asked + 2, "its configuration and one layer"
    assert one.digest != two.digest


def test_pulls_at_the_same_time_transfer_once(
    world: World, registry: Registry, faults: FaultProxy, tmp_path: Path
) -> None:
    shared = tar_of([Entry("big", os.urandom(1 << 20))])
    make_layout(tmp_path / "one", [shared])
    make_layout(tmp_path / "two", [shared, files(two="2")])
    for name in ("one", "two"):
        registry.push(tmp_path / name, f"same/{name}:1")

    def slow(answer: object) -> bool:
        time.sleep(0.2)
        return False

    faults.fault = slow
    images = world.images()

    async def together() -> list[str]:
        found = await asyncio.gather(
            *(images.pull(f"{faults.host}/same/one:1") for _ in range(4)),
            images.pull(f"{faults.host}/same/two:1"),
        )
        return [info.digest for info in found]

    digests = asyncio.run(together())
    assert len(set(digests)) == 2
    layer = json.loads((tmp_path / "one/index.json").read_text())["manifests"][0]["digest"]
    manifest = json.loads((tmp_path / "one/blobs/sha256" / layer[7:]).read_text())
    assert faults.blobs().count(manifest["layers"][0]["digest"]) == 1
    manifests = [r for r in faults.requests if "same/one/manifests" in r and r.startswith("GET")]
    assert len(manifests) == 1


def test_tag_that_moves(world: World, registry: Registry, tmp_path: Path) -> None:
    make_layout(tmp_path / "a", [files(v="1")])
    make_layout(tmp_path / "b", [files(v="2")])
    reference = registry.push(tmp_path / "a", "move:latest").removesuffix(":latest")
    images = world.images()
    first = asyncio.run(images.pull(reference))
    registry.push(tmp_path / "b", "move:latest")
    kept = asyncio.run(images.pull(reference, refresh=False))
    moved = asyncio.run(images.pull(reference))
    assert kept.digest == first.digest != moved.digest
    assert asyncio.run(images.get(first.digest)).names == ()
    assert moved.names == (f"{reference}:latest",)
    by_digest = asyncio.run(images.pull(f"{reference}@{first.source}"))
    assert by_digest.digest == first.digest
    assert asyncio.run(images.get(first.digest[7:19])).digest == first.digest


def test_the_hosts_processor_is_chosen(world: World, registry: Registry, tmp_path: Path) -> None:
    make_multi_layout(tmp_path / "m", {"amd64": [files(p="amd64")], "arm64": [files(p="arm64")]})
    images = world.images()
    info = asyncio.run(images.pull(registry.push(tmp_path / "m", "multi:1")))
    wanted = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    assert world.texts(images, info.digest) == {"p": wanted}
    make_multi_layout(tmp_path / "n", {"s390x": [files(p="s390x")]})
    with pytest.raises(ImageNotFound):
        asyncio.run(images.pull(registry.push(tmp_path / "n", "multi:2")))
    make_layout(tmp_path / "o", [files(p="s390x")], arch="s390x")
    with pytest.raises(ImageNotFound, match="s390x"):
        asyncio.run(images.pull(registry.push(tmp_path / "o", "multi:3")))


def test_credentials(world: World, closed_registry: Registry, tmp_path: Path) -> None:
    make_layout(tmp_path / "l", [files(a="1")])
    reference = closed_registry.push(tmp_path / "l", "private:1")
    images = world.images()
    with pytest.raises(RegistryDenied):
        asyncio.run(images.pull(reference))
    wrong = RegistryAuth(username=USER, password="not-the-password")
    with pytest.raises(RegistryDenied) as raised:
        asyncio.run(images.pull(reference, auth=wrong))
    assert "not-the-password" not in raised.value.message
    right = RegistryAuth(username=USER, password=PASSWORD)
    info = asyncio.run(images.pull(reference, auth=right))
    assert world.texts(images, info.digest) == {"a": "1"}
    pushed = asyncio.run(images.push(info.digest, f"{closed_registry.host}/private:2", auth=right))
    assert pushed.startswith("sha256:")
    with pytest.raises(RegistryDenied):
        asyncio.run(images.push(info.digest, f"{closed_registry.host}/private:3"))
    kept = list((world.root / "images").rglob("*.json"))
    assert kept
    assert not [p for p in kept if PASSWORD in p.read_text()]


def test_credentials_of_the_node(world: World, closed_registry: Registry, tmp_path: Path) -> None:
    make_layout(tmp_path / "l", [files(a="1")])
    reference = closed_registry.push(tmp_path / "l", "private-node:1")
    config = tmp_path / "auth.json"
    login = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    auths = {closed_registry.host: {"auth": login}}
    config.write_text(json.dumps({"auths": auths}))
    images = world.images(registry_auth_file=str(config))
    assert asyncio.run(images.pull(reference)).layers


def test_mirror_first_then_the_registry(
    world: World, registry: Registry, faults: FaultProxy, tmp_path: Path
) -> None:
    make_layout(tmp_path / "l", [files(a="1")])
    registry.push(tmp_path / "l", "library/mirrored:1")
    images = world.images(registry_mirrors={"docker.io": [faults.host]})
    info = asyncio.run(images.pull("mirrored:1"))
    assert info.names == ("docker.io/library/mirrored:1",)
    assert faults.blobs()
    # A mirror without the image is passed over.
    make_layout(tmp_path / "m", [files(a="2")])
    registry.push(tmp_path / "m", "only/here:1")
    faults.fault = lambda answer: answer.refuse(404)
    images = world.images(registry_mirrors={registry.host: [faults.host]})
    assert asyncio.run(images.pull(f"{registry.host}/only/here:1")).layers


def test_pull_killed_in_the_middle(
    world: World, registry: Registry, faults: FaultProxy, tmp_path: Path
) -> None:
    make_layout(tmp_path / "l", [files(first="1"), tar_of([Entry("big", os.urandom(1 << 20))])])
    reference = registry.push(tmp_path / "l", "killed:1")
    manifest = json.loads((tmp_path / "l/index.json").read_text())["manifests"][0]["digest"]
    layers = json.loads((tmp_path / "l/blobs/sha256" / manifest[7:]).read_text())["layers"]
    stuck = layers[1]["digest"]

    def hang(answer: object) -> bool:
        if stuck in answer.path:  # type: ignore[attr-defined]
            time.sleep(60)
        return False

    faults.fault = hang
    command = [sys.executable, "-c", _PULL_SCRIPT, str(world.root), f"{faults.host}/killed:1"]
    process = subprocess.Popen(command)
    until = time.monotonic() + 30
    images = world.images()
    while not images.store.layers():
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert asyncio.run(images.all()) == []
    assert pulls_left(world)
    again = world.images()
    # Not yet swept: what was finished is found again.
    faults.fault = None
    faults.requests.clear()
    info = asyncio.run(again.pull(f"{faults.host}/killed:1"))
    assert layers[0]["digest"] not in faults.blobs()
    assert set(world.tree(again, info.digest)) == {".", "first", "big"}
    asyncio.run(again.sweep())
    assert not pulls_left(world)
    assert asyncio.run(again.all())[0].digest == info.digest
    assert asyncio.run(again.pull(reference)).digest == info.digest


def test_what_a_killed_pull_left_is_swept(world: World, registry: Registry, tmp_path: Path) -> None:
    images = world.images()
    (tmp_path / "orphan").write_bytes(b"layer")
    layer = images.store.adopt(tmp_path / "orphan", key="sha256:" + "0" * 64)
    (world.root / "images/pulls/half").mkdir(parents=True)
    asyncio.run(images.sweep())
    assert images.store.layers() == [layer], "a repeated pull may go on from it"
    os.utime(world.root / f"images/layers/{layer}/layer.json", (1, 1))
    asyncio.run(images.sweep())
    assert images.store.layers() == []
    assert not pulls_left(world)
    assert list((world.root / "images/diffs").iterdir()) == []


def test_more_layers_than_an_overlay_takes(
    world: World, registry: Registry, tmp_path: Path
) -> None:
    layers = [tar_of([Entry("d/", kind=tarfile.DIRTYPE, mode=0o755), Entry("d/first", b"1")])]
    layers += [files(**{f"f{n}": str(n), "last": str(n)}) for n in range(68)]
    layers[5] = tar_of([Entry("d/.wh.first"), Entry(".wh.f2")])
    layers.append(tar_of([Entry(".wh.f60"), Entry("d/top", b"t")]))
    make_layout(tmp_path / "l", layers)
    images = world.images()
    info = asyncio.run(images.pull(registry.push(tmp_path / "l", "many:1")))
    assert len(info.layers) <= 64
    texts = world.texts(images, info.digest)
    wanted = {f"f{n}" for n in range(68)} - {"f2", "f4", "f60"}
    assert {name for name in texts if name.startswith("f")} == wanted
    assert texts["last"] == "67"
    assert {n for n in texts if n.startswith("d/")} == {"d/top"}
    assert world.tree(images, info.digest)["d"].mode == 0o755
    # Collapsed once: the same stem with one more layer finds it.
    make_layout(tmp_path / "m", [*layers, files(more="m")])
    more = asyncio.run(images.pull(registry.push(tmp_path / "m", "many:2")))
    assert more.layers[0] == info.layers[0]


def test_layer_that_hides_everything_below(
    world: World, registry: Registry, tmp_path: Path
) -> None:
    upper = [Entry(".wh..wh..opq"), Entry("new", b"n")]
    make_layout(tmp_path / "l", [files(old="o", d_x="x"), tar_of(upper), files(top="t")])
    images = world.images()
    info = asyncio.run(images.pull(registry.push(tmp_path / "l", "opaque:1")))
    assert world.texts(images, info.digest) == {"new": "n", "top": "t"}
    # A layer of the same files that hides nothing is another one.
    make_layout(tmp_path / "m", [files(old="o"), tar_of(upper[1:])])
    other = asyncio.run(images.pull(registry.push(tmp_path / "m", "opaque:2")))
    assert world.texts(images, other.digest) == {"old": "o", "new": "n"}


def test_composition(world: World, registry: Registry, tmp_path: Path) -> None:
    make_layout(
        tmp_path / "base", [files(a="base", b="base")], {"Env": ["A=1", "B=1"], "User": "u"}
    )
    make_layout(
        tmp_path / "tool", [files(b="tool", c="tool")], {"Env": ["B=2"], "WorkingDir": "/w"}
    )
    images = world.images()
    base, tool = (
        asyncio.run(images.pull(registry.push(tmp_path / name, f"part/{name}:1")))
        for name in ("base", "tool")
    )
    both = asyncio.run(images.compose([base.digest, tool.digest]))
    assert world.texts(images, both.digest) == {"a": "base", "b": "tool", "c": "tool"}
    assert both.config.env == {"A": "1", "B": "2"}
    assert (both.config.user, both.config.workdir) == ("u", "/w")
    assert both.layers == (*base.layers, *tool.layers)
    turned = asyncio.run(images.compose([tool.digest, base.digest]))
    assert world.texts(images, turned.digest)["b"] == "base"
    assert turned.digest != both.digest
    # The same part twice lies where it lies highest.
    again = asyncio.run(images.compose([base.digest, tool.digest, base.digest]))
    assert again.layers == (*tool.layers, *base.layers)
    with pytest.raises(ImageNotFound):
        asyncio.run(images.compose([base.digest, "sha256:" + "0" * 64]))


def test_removal_and_what_is_in_use(world: World, registry: Registry, tmp_path: Path) -> None:
    shared = files(shared="s")
    make_layout(tmp_path / "one", [shared, files(one="1")])
    make_layout(tmp_path / "two", [shared, files(two="2")])
    images = world.images()
    one, two = (
        asyncio.run(images.pull(registry.push(tmp_path / name, f"rm/{name}:1")))
        for name in ("one", "two")
    )
    world.in_use.add(one.digest)
    with pytest.raises(ImageInUse):
        asyncio.run(images.remove(one.names[0]))
    asyncio.run(images.remove(two.digest))
    assert {info.digest for info in asyncio.run(images.all())} == {one.digest}
    assert set(images.store.layers()) == set(one.layers)
    report = asyncio.run(images.prune())
    assert report.images == ()
    world.in_use.clear()
    assert asyncio.run(images.prune(keep=[one.digest])).images == ()
    assert asyncio.run(images.prune(unused_for_s=3600)).images == ()
    report = asyncio.run(images.prune())
    assert (report.images, report.layers) == ((one.digest,), 2)
    assert report.freed_bytes > 0
    assert images.store.layers() == []
    with pytest.raises(ImageNotFound):
        asyncio.run(images.get(one.digest))


def test_quota_takes_what_was_used_longest_ago(
    world: World, registry: Registry, tmp_path: Path
) -> None:
    images = world.images(image_store_mb=8)
    pulled = []
    for name in ("a", "b", "c"):
        make_layout(tmp_path / name, [tar_of([Entry(name, os.urandom(3 << 20))])])
        pulled.append(
            asyncio.run(images.pull(registry.push(tmp_path / name, f"quota/{name}:1"))).digest
        )
        os.utime(world.root / "images/images" / f"{pulled[-1][7:]}.json", (len(pulled),) * 2)
    left = {info.digest for info in asyncio.run(images.all())}
    assert left == {pulled[1], pulled[2]}
    world.in_use.update(left)
    make_layout(tmp_path / "d", [tar_of([Entry("d", os.urandom(3 << 20))])])
    with pytest.raises(NodeFull, match="8 MiB"):
        asyncio.run(images.pull(registry.push(tmp_path / "d", "quota/d:1")))


def test_layers_that_swell_beyond_the_quota(
    world: World, registry: Registry, tmp_path: Path
) -> None:
    # Of little use to EROFS, which packs it in small pieces, but gzip halves it.
    noise = b"".join(os.urandom(2048) + bytes(2048) for _ in range(3000))
    make_layout(tmp_path / "l", [tar_of([Entry("a", os.urandom(20_000) * 300), Entry("b", noise)])])
    images = world.images(image_store_mb=10)
    reference = registry.push(tmp_path / "l", "swell:1")
    with pytest.raises(NodeFull, match="10 MiB"):
        asyncio.run(images.pull(reference))
    assert asyncio.run(images.all()) == []
    assert images.store.layers() == []


def test_imports(world: World, tmp_path: Path) -> None:
    make_layout(tmp_path / "in/layout", [files(a="1")], {"User": "me"})
    subprocess.run(
        ["skopeo", "--insecure-policy", "copy", "--quiet", f"oci:{tmp_path}/in/layout",
         f"docker-archive:{tmp_path}/in/docker.tar:x:1"],
        check=True,
    )  # fmt: skip
    subprocess.run(
        ["skopeo", "--insecure-policy", "copy", "--quiet", f"oci:{tmp_path}/in/layout",
         f"oci-archive:{tmp_path}/in/oci.tar"],
        check=True,
    )  # fmt: skip
    (tmp_path / "in/root.tar").write_bytes(files(a="1"))
    images = world.images(image_import_dirs=[str(tmp_path / "in")])
    digests = {
        asyncio.run(images.pull(f"{kind}:{tmp_path}/in/{name}")).digest
        for kind, name in (
            ("oci", "layout"), ("docker-archive", "docker.tar"), ("oci-archive", "oci.tar"),
        )
    }  # fmt: skip
    assert len(digests) == 1
    plain = asyncio.run(images.pull(f"tar:{tmp_path}/in/root.tar"))
    assert world.texts(images, plain.digest) == {"a": "1"}
    assert set(images.store.layers()) == set(plain.layers), "it is the same layer"
    with pytest.raises(Forbidden):
        asyncio.run(images.pull("oci:/etc"))
    (tmp_path / "in/out").symlink_to("/etc")
    with pytest.raises(Forbidden):
        asyncio.run(images.pull(f"tar:{tmp_path}/in/out/passwd"))
    with pytest.raises(ImageNotFound):
        asyncio.run(images.pull(f"oci:{tmp_path}/in/nothing"))
    with pytest.raises(OpendsecError):
        asyncio.run(images.pull(f"oci-archive:{tmp_path}/in/root.tar"))
    assert not pulls_left(world)


def test_pushed_image_comes_back_the_same(world: World, registry: Registry, tmp_path: Path) -> None:
    lower = tar_of([Entry("d/", kind=tarfile.DIRTYPE, mode=0o755), Entry("d/x", b"x")])
    upper = tar_of([Entry("d/.wh..wh..opq"), Entry("d/y", b"y"), Entry("s", b"", mode=0o4711)])
    make_layout(tmp_path / "l", [lower, upper], {"Env": ["A=1"], "Cmd": ["sh"]})
    images = world.images()
    info = asyncio.run(images.pull(registry.push(tmp_path / "l", "push/in:1")))
    digest = asyncio.run(images.push(info.digest, f"{registry.host}/push/out:1"))
    other = World(tmp_path / "other")
    other.root.mkdir()
    back = asyncio.run(other.images().pull(f"{registry.host}/push/out@{digest}"))
    assert back.config == info.config
    assert set(other.tree(other.images(), back.digest)) == {".", "d", "d/y", "s"}
    with pytest.raises(InvalidRequest):
        asyncio.run(images.push(info.digest, f"{registry.host}/push/out@{digest}"))
    with pytest.raises(ImageNotFound):
        asyncio.run(images.push("no-such-image", f"{registry.host}/push/out:2"))


def test_empty_image(world: World, registry: Registry, tmp_path: Path) -> None:
    make_layout(tmp_path / "l", [], {"Cmd": ["/x"]})
    images = world.images()
    info = asyncio.run(images.pull(registry.push(tmp_path / "l", "empty:1")))
    assert set(world.tree(images, info.digest)) == {"."}


@pytest.mark.parametrize(
    "text",
    ["", "UPPER", "a b", "host:5000/", "../x", "a@sha256:12", "x:" + "t" * 200, "a" * 300, "-x",
     "--help", "docker://x", "x:tag:tag", "http://x/y"],
)  # fmt: skip
def test_what_is_no_reference(world: World, text: str) -> None:
    with pytest.raises(InvalidRequest):
        asyncio.run(world.images().pull(text))
