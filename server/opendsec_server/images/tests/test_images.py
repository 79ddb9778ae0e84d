# SPDX-License-Identifier: AGPL-3.0-only
"""Names and layers, the host's mirrors and authorities, and when the template is built."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from opendsec_server.config import Config
from opendsec_server.images import base, certificates
from opendsec_server.images.apt_sources import (
    Distribution,
    UnsupportedHost,
    host_distribution,
    mirror_lines,
)
from opendsec_server.images.base import CONFIG
from opendsec_server.images.store import ImageNotFound, ImageStore

DEBIAN = Distribution("debian", "bookworm", "Debian")


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_store(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images")
    with pytest.raises(ImageNotFound):
        store.find("base")
    layer = write(tmp_path / "layer", "content")
    with store.locked():
        made = store.add("base", layer, config=CONFIG, recipe="r", description="d", at=1.0)
        again = store.add("other", layer, config=CONFIG, recipe="r", description="d", at=1.0)
    assert made.digest == again.digest
    assert ImageStore(store.root).find("base") == made
    assert store.layer_path(made.layers[0]).read_text() == "content"
    assert layer.exists()
    store.layer_path(made.layers[0]).unlink()
    with pytest.raises(ImageNotFound, match="missing"):
        store.find("base")


@pytest.mark.parametrize(
    ("text", "family", "codename"),
    [
        ('ID=debian\nVERSION_CODENAME=bookworm\nPRETTY_NAME="D 12"\n', "debian", "bookworm"),
        ("ID=ubuntu\nID_LIKE=debian\nVERSION_CODENAME=noble\n", "ubuntu", "noble"),
        ('ID=linuxmint\nID_LIKE="ubuntu debian"\nUBUNTU_CODENAME=noble\n', "ubuntu", "noble"),
    ],
)
def test_distribution(tmp_path: Path, text: str, family: str, codename: str) -> None:
    found = host_distribution(write(tmp_path / "os-release", text))
    assert (found.family, found.codename) == (family, codename)


def test_other_distribution(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedHost, match="Debian or Ubuntu"):
        host_distribution(write(tmp_path / "os-release", "ID=fedora\nPRETTY_NAME=Fedora\n"))


def test_mirrors_of_the_host_are_used_and_strangers_are_not(tmp_path: Path) -> None:
    write(
        tmp_path / "sources.list.d/debian.sources",
        "# a comment\nTypes: deb\nURIs: http://mirror.corp/debian\nSuites: bookworm "
        "bookworm-updates\nComponents: main\n\nTypes: deb\nEnabled: no\n"
        "URIs: http://off/debian\nSuites: bookworm-security\nComponents: main\n",
    )
    write(
        tmp_path / "sources.list", "deb [signed-by=/x] https://other.example/tool bookworm main\n"
    )
    assert mirror_lines(DEBIAN, tmp_path) == [
        "deb http://mirror.corp/debian bookworm main",
        "deb http://mirror.corp/debian bookworm-updates main",
        "deb http://deb.debian.org/debian-security bookworm-security main",
    ]


def test_mirrors_by_default(tmp_path: Path) -> None:
    lines = mirror_lines(Distribution("ubuntu", "noble", "Ubuntu"), tmp_path)
    assert lines[0] == "deb http://archive.ubuntu.com/ubuntu noble main universe"
    assert len(lines) == 3


def pem(text: str) -> str:
    return f"-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----"


def test_only_missing_authorities_are_added(tmp_path: Path) -> None:
    host = write(tmp_path / "host.pem", "\n".join(map(pem, ("AAAA", "BBBB", "AAAA"))))
    root = tmp_path / "root"
    write(root / "etc/ssl/certs/ca-certificates.crt", pem("AAAA") + "\n")
    authorities = certificates.host_authorities(host)
    assert len(authorities) == 2
    assert certificates.install_missing(authorities, root) == 1
    added = list((root / "usr/local/share/ca-certificates").iterdir())
    assert [p.read_text() for p in added] == [pem("BBBB") + "\n"]


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Records the programs of a build; ``mkfs.erofs`` writes a small layer."""
    done: list[list[str]] = []

    def run(argv: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        done.append(argv)
        if argv[0] == "mkfs.erofs":
            Path(argv[-2]).write_text("layer")
        return subprocess.CompletedProcess(argv, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(base, "_authorities", lambda _config: [])
    monkeypatch.delenv("OPENDSEC_IMAGE_CACHE", raising=False)
    return done


def names(builds: list[list[str]]) -> list[str]:
    return [argv[0] for argv in builds if argv[0] != "apt-config"]


def test_built_once(tmp_path: Path, builds: list[list[str]]) -> None:
    config = Config(state_dir=str(tmp_path))
    lines: list[str] = []
    first = base.ensure_base(config, lines.append)
    assert names(builds) == ["mmdebstrap", "chroot", "mkfs.erofs"]
    assert any("ready" in line for line in lines)
    builds.clear()
    assert base.ensure_base(config) == first
    assert names(builds) == []


def test_built_again_when_the_recipe_changes(
    tmp_path: Path, builds: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(state_dir=str(tmp_path))
    base.ensure_base(config)
    builds.clear()
    monkeypatch.setattr(base, "PACKAGES", ("bash",))
    base.ensure_base(config)
    assert "mmdebstrap" in names(builds)


def test_cache_is_shared(
    tmp_path: Path, builds: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENDSEC_IMAGE_CACHE", str(tmp_path / "cache"))
    one = base.ensure_base(Config(state_dir=str(tmp_path / "one")))
    builds.clear()
    two = base.ensure_base(Config(state_dir=str(tmp_path / "two")))
    assert one.digest == two.digest
    assert names(builds) == []
    kept = ImageStore(tmp_path / "two/images").layer_path(two.layers[0])
    assert kept.stat().st_nlink == 3


def test_failed_build_names_the_log(
    tmp_path: Path, builds: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(argv: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(argv, 25 if argv[0] == "mmdebstrap" else 0, "", "")

    monkeypatch.setattr(subprocess, "run", fail)
    config = Config(state_dir=str(tmp_path))
    with pytest.raises(base.BaseBuildError, match=r"exit status 25.*build-base\.log"):
        base.ensure_base(config)
    with pytest.raises(ImageNotFound):
        ImageStore(tmp_path / "images").find("base")


def test_missing_tool(
    tmp_path: Path, builds: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(argv: list[str], **options: object) -> None:
        raise FileNotFoundError(argv[0])

    monkeypatch.setattr(subprocess, "run", absent)
    with pytest.raises(base.BaseBuildError, match="mmdebstrap is not installed"):
        base.ensure_base(Config(state_dir=str(tmp_path)))


def earlier_store(root: Path) -> str:
    """A store as earlier versions made it; the layer's digest."""
    layer = hashlib.sha256(b"layer").hexdigest()
    write(root / layer / "layer.erofs", "layer")
    manifest = {
        "digest": layer,
        "size_bytes": 5,
        "recipe": "r",
        "description": "d",
        "created_at": 7,
    }
    write(root / layer / "manifest.json", json.dumps(manifest))
    (root / layer / "mnt").mkdir()
    write(root / "index.json", json.dumps({"base": layer}))
    write(root / "disks/index.json", "{}")
    return layer


def test_earlier_store_is_taken_over(tmp_path: Path) -> None:
    layer = earlier_store(tmp_path)
    store = ImageStore(tmp_path)
    image = store.find("base")
    assert (image.layers, image.config.user, image.recipe) == ((layer,), "user", "r")
    assert store.info(image).size_bytes == 5
    assert store.mount_path(layer).is_dir()
    assert (tmp_path / "disks/index.json").exists()
    assert not (tmp_path / "index.json").exists()
    assert ImageStore(tmp_path).find("base") == image
    store.sweep()
    assert store.find("base") == image


def test_taking_over_goes_on_after_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier_store(tmp_path)
    real = Path.rename

    def crash(path: Path, target: Path) -> Path:
        if target.name == "names.json":
            raise KeyboardInterrupt
        return real(path, target)

    monkeypatch.setattr(Path, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        ImageStore(tmp_path)
    monkeypatch.undo()
    assert ImageStore(tmp_path).find("base").recipe == "r"
