# SPDX-License-Identifier: AGPL-3.0-only
"""References, shared work, the credentials that skopeo is given."""

from __future__ import annotations

import asyncio
import errno
import json
from pathlib import Path

import pytest

from opendsec_server.contract.errors import (
    ImageDamaged,
    ImageNotFound,
    Internal,
    InvalidRequest,
    NodeFull,
    OpendsecError,
)
from opendsec_server.contract.images import ImageConfig, RegistryAuth
from opendsec_server.images import auth, convert, manifests, registry
from opendsec_server.images.flights import Flights
from opendsec_server.images.references import canonical, parse
from opendsec_server.images.store import distinct, image_digest

DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("alpine", "docker.io/library/alpine:latest"),
        ("alpine:3.20", "docker.io/library/alpine:3.20"),
        ("team/app", "docker.io/team/app:latest"),
        ("index.docker.io/library/alpine", "docker.io/library/alpine:latest"),
        ("host:5000/a/b/c:t", "host:5000/a/b/c:t"),
        ("localhost/x", "localhost/x:latest"),
        ("ghcr.io/o/n@" + DIGEST, "ghcr.io/o/n@" + DIGEST),
        ("ghcr.io/o/n:t@" + DIGEST, "ghcr.io/o/n:t@" + DIGEST),
        ("127.0.0.1:5000/x", "127.0.0.1:5000/x:latest"),
    ],
)
def test_references(text: str, full: str) -> None:
    assert canonical(text) == full
    assert canonical(full) == full


@pytest.mark.parametrize(
    "text",
    ["", "A", "a//b", "a:", "a@", "a@sha256:0", "-a", "a b", "a\0", "host:99999999/a", "a/",
     "[::::]:5000/a", "[1]/a", "host:65536/a", "host:0/a"],
)  # fmt: skip
def test_no_references(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse(text)


def test_digest_wins_at_the_registry() -> None:
    reference = parse("h.example/n:t@" + DIGEST)
    assert reference.at("mirror:5000") == f"docker://mirror:5000/n@{DIGEST}"
    assert parse("h.example/n").at("h.example") == "docker://h.example/n:latest"


async def test_work_is_shared_and_given_up_with_the_last() -> None:
    flights: Flights[int] = Flights()
    begun, ended = 0, 0
    go = asyncio.Event()

    async def work() -> int:
        nonlocal begun, ended
        begun += 1
        try:
            await go.wait()
        finally:
            ended += 1
        return 7

    async def join() -> int:
        return await flights.join("k", work)

    first, second = asyncio.ensure_future(join()), asyncio.ensure_future(join())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first})
    assert (begun, ended) == (1, 0), "somebody still waits"
    go.set()
    assert await second == 7
    go.clear()
    alone = asyncio.ensure_future(join())
    await asyncio.sleep(0)
    alone.cancel()
    await asyncio.wait({alone})
    assert (begun, ended) == (2, 2)
    assert "k" not in flights


async def test_failure_reaches_all_and_is_forgotten() -> None:
    flights: Flights[int] = Flights()

    async def fail() -> int:
        await asyncio.sleep(0)
        raise ImageDamaged("x")

    async def work() -> int:
        return 1

    results = await asyncio.gather(
        *(flights.join("k", fail) for _ in range(3)), return_exceptions=True
    )
    assert [type(result) for result in results] == [ImageDamaged] * 3
    assert await flights.join("k", work) == 1


def test_what_the_disk_refuses_is_typed() -> None:
    with pytest.raises(NodeFull, match="no disk left"), convert.disk_errors():
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(Internal, match="Read-only"), convert.disk_errors():
        raise OSError(errno.EROFS, "Read-only file system")


def test_credentials_go_by_descriptor(tmp_path: Path) -> None:
    login = RegistryAuth(username="u", password="p:w")
    with auth.for_skopeo("h:1", login, tmp_path / "other") as options:
        (flag, path) = options.arguments
        assert flag == "--authfile"
        assert json.loads(Path(path).read_text()) == {"auths": {"h:1": {"auth": "dTpwOnc="}}}
        assert not Path(f"/proc/self/fd/{options.fds[0]}").readlink().is_file()
    with auth.for_skopeo("h:1", None, None) as options:
        assert options.arguments == ("--no-creds",)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"auths": {"h:1": {"auth": "dTpwOnc="}, "x": 3}}))
    assert auth.known("h:1", None, file) == login
    assert auth.known("x", None, file) is None
    assert auth.known("other", None, file) is None


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("reading manifest 1 in h/n: manifest unknown", ImageNotFound),
        ('no image found in manifest list for architecture s390x, variant "", OS linux',
         ImageNotFound),
        ("corrupted blob, expecting sha256:0", ImageDamaged),
        ("denied: requested access to the resource is denied", None),
        ("toomanyrequests: later", None),
        ("read tcp: connection reset by peer", None),
    ],
)  # fmt: skip
def test_words_of_skopeo(text: str, kind: type[OpendsecError] | None) -> None:
    found = registry.from_text(text, "x")
    assert (None if found is None else type(found)) is kind


def test_digest_is_of_content_and_configuration() -> None:
    plain = image_digest(["a" * 64], ImageConfig(env={"A": "1", "B": "2"}))
    assert plain == image_digest(["a" * 64], ImageConfig(env={"B": "2", "A": "1"}))
    assert plain != image_digest(["a" * 64], ImageConfig())
    assert plain != image_digest(["b" * 64], ImageConfig(env={"A": "1", "B": "2"}))
    assert distinct(["a", "b", "a", "c"]) == ("b", "a", "c")


def test_command_goes_with_its_entry_point() -> None:
    low = ImageConfig(entrypoint=("/e",), cmd=("x",), user="u")
    high = ImageConfig(cmd=("y",), env={"A": "1"})
    both = manifests.merged([low, high])
    assert (both.entrypoint, both.cmd, both.user, both.env) == ((), ("y",), "u", {"A": "1"})
