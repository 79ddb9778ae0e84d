# SPDX-License-Identifier: AGPL-3.0-only
"""Images of registries that not everybody may have."""

from __future__ import annotations

import asyncio
from asyncio import Task
from pathlib import Path

import pytest

from opendsec_server.config import Config
from opendsec_server.contract.errors import Forbidden, ImageNotFound, RegistryDenied
from opendsec_server.contract.images import ImageConfig, ImageInfo, PullProgress, RegistryAuth
from opendsec_server.control.iam import Caller
from opendsec_server.control.image_access import full_name, registry_of
from opendsec_server.control.params import CreateParams
from opendsec_server.control.services import Services
from opendsec_server.store.records import SandboxExtra

from .fake_node import FakeNode
from .seed import seeded

GOOD, BAD = (RegistryAuth(username="u", password=word) for word in ("good", "bad"))
PINNED = "r.example/private@sha256:" + "0" * 64


async def in_project(services: Services, caller: Caller, name: str) -> Caller:
    made = await services.projects.create(caller, name, None, {})
    key = services.config.api_key_file.read_text().strip()
    return await services.iam.authenticate(key, made.project.project_id)


def of(reference: str) -> CreateParams:
    return CreateParams(extra=SandboxExtra(image=reference))


async def test_a_password_opens_an_image_for_its_project_only(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    for reference in ("r.example/private", PINNED):
        node.images.offered[reference] = ({"/secret": reference}, ImageConfig(), GOOD)
    one, two = [await in_project(services, caller, name) for name in ("one", "two")]
    for reference in ("r.example/private", PINNED):
        image = await services.images.pull(one, reference, auth=GOOD, refresh=True)
        await services.creates.create(one, of(reference))
        for refused in (of(reference), of(image.digest)):
            with pytest.raises((RegistryDenied, ImageNotFound)):
                await services.creates.create(two, refused)
        with pytest.raises(ImageNotFound):
            await services.images.get(two, reference)
        assert image.digest not in [seen.digest for seen in await services.images.list(two)]
        assert image.digest in [seen.digest for seen in await services.images.list(one)]
        for auth in (None, BAD):
            for refresh in (True, False):
                with pytest.raises(RegistryDenied):
                    await services.images.pull(two, reference, auth=auth, refresh=refresh)
        await services.images.pull(two, reference, auth=GOOD, refresh=False)
        await services.creates.create(two, of(reference))


async def test_what_the_registry_gives_to_all_is_everybodys(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    one, two = [await in_project(services, caller, name) for name in ("one", "two")]
    # With a password that it does not need.
    node.images.offered["r.example/open"] = ({"/a": "a"}, ImageConfig(), None)
    await services.images.pull(one, "r.example/open", auth=GOOD, refresh=True)
    await services.creates.create(two, of("r.example/open"))
    three = await in_project(services, caller, "three")
    node.images.fail_pull = AssertionError("nobody need ask again")
    await services.creates.create(three, of("r.example/open"))
    node.images.fail_pull = None
    # One that was here before stays everybody's, whoever pulls it with a password.
    await services.images.pull(one, "alpine", auth=None, refresh=True)
    await services.images.pull(one, "alpine", auth=GOOD, refresh=True)
    await services.images.get(two, "alpine")


async def pulling(services: Services, node: FakeNode, one: Caller, name: str) -> Task[ImageInfo]:
    """A pull with a password, at the moment when the image is on the node and nobody knows it."""
    node.images.offered[name] = ({"/secret": name}, ImageConfig(), GOOD)
    node.images.landed = asyncio.Event()
    pull = asyncio.create_task(services.images.pull(one, name, auth=GOOD, refresh=True))
    async with asyncio.timeout(30):
        while not any(full_name(name) in i.names for i in node.images.infos.values()):
            await asyncio.sleep(0)
    return pull


@pytest.mark.parametrize("name", ["r.example/private", "private:v1", PINNED])
async def test_an_image_that_is_being_pulled_with_a_password_is_nobodys(
    services: Services, node: FakeNode, caller: Caller, name: str
) -> None:
    one, two = [await in_project(services, caller, text) for text in ("one", "two")]
    pull = await pulling(services, node, one, name)
    landed, node.images.landed = node.images.landed, None
    assert landed is not None
    digest = (await node.images.get(name)).digest
    for refused in (of(name), of(digest)):
        with pytest.raises((RegistryDenied, ImageNotFound)):
            await services.creates.create(two, refused)
    for refresh in (True, False):
        with pytest.raises(RegistryDenied):
            await services.images.pull(two, name, auth=None, refresh=refresh)
    for reference in (name, digest):
        with pytest.raises(ImageNotFound):
            await services.images.get(two, reference)
    assert digest not in [seen.digest for seen in await services.images.list(two)]
    landed.set()
    assert (await pull).digest == digest
    await services.creates.create(one, of(name))
    with pytest.raises((RegistryDenied, ImageNotFound)):
        await services.creates.create(two, of(name))


async def test_a_pull_that_was_cut_off_leaves_nothing_open(config: Config, node: FakeNode) -> None:
    name = "r.example/private"
    services = await Services.start(config, node)
    first = await services.iam.authenticate(config.api_key_file.read_text().strip())
    one, two = [await in_project(services, first, text) for text in ("one", "two")]
    pull = await pulling(services, node, one, name)
    for task in list(services.images._attempts.tasks):
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    await services.stop()
    node.images.landed = None
    services = await Services.start(config, node)
    try:
        for whose in (one, two):
            with pytest.raises((RegistryDenied, ImageNotFound)):
                await services.creates.create(whose, of(name))
        await services.images.pull(one, name, auth=GOOD, refresh=False)
        await services.creates.create(one, of(name))
        with pytest.raises((RegistryDenied, ImageNotFound)):
            await services.creates.create(two, of(name))
    finally:
        await services.stop()


async def test_what_was_here_stays_everybodys_while_it_is_pulled_with_a_password(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    one, two = [await in_project(services, caller, text) for text in ("one", "two")]
    await services.images.pull(one, "alpine", auth=None, refresh=True)
    node.images.landed = asyncio.Event()
    pull = asyncio.create_task(services.images.pull(one, "alpine", auth=GOOD, refresh=True))
    async with asyncio.timeout(30):
        while len(node.images.pulls) < 2:
            await asyncio.sleep(0)
    assert (await services.images.get(two, "alpine")).digest
    await services.creates.create(two, of("alpine"))
    node.images.landed.set()
    await pull
    await services.creates.create(two, of("alpine"))


@pytest.mark.parametrize("auth", [BAD, GOOD])
async def test_a_pull_that_failed_closes_nothing(
    services: Services, node: FakeNode, caller: Caller, auth: RegistryAuth
) -> None:
    one, two = [await in_project(services, caller, text) for text in ("one", "two")]
    node.images.fail_pull = RegistryDenied("no")
    with pytest.raises(RegistryDenied):
        await services.images.pull(one, "r.example/open", auth=auth, refresh=True)
    node.images.fail_pull = None
    node.images.add({"/a": "b"}, names=("r.example/open:latest",))
    await services.creates.create(two, of("r.example/open"))


async def test_nobody_sees_what_others_pull(
    services: Services, node: FakeNode, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = [await in_project(services, caller, text) for text in ("one", "two")]
    pull = await pulling(services, node, one, "r.example/private")

    async def progress() -> list[PullProgress]:
        name = "r.example/private:latest"
        return [PullProgress(reference=name, layers=1, layers_done=0, bytes_total=1, bytes_done=0)]

    monkeypatch.setattr(node.images, "progress", progress)
    assert [len(await services.images.progress(who)) for who in (one, two, caller)] == [1, 0, 1]
    assert node.images.landed is not None
    node.images.landed.set()
    await pull
    assert await services.images.progress(one) == []


@pytest.fixture
def few(tmp_path: Path) -> Config:
    return Config(state_dir=str(seeded(tmp_path)), image_registries=("*.example", "docker.io"))


async def test_registries_may_be_few(few: Config, node: FakeNode) -> None:
    config = few
    services = await Services.start(config, node)
    try:
        first = await services.iam.authenticate(config.api_key_file.read_text().strip())
        one = await in_project(services, first, "one")
        for reference in ("r.example/x", "alpine", "evil.test/x", "evil.test:5000/x"):
            node.images.offered[reference] = ({"/a": reference}, ImageConfig(), None)
        for allowed in ("r.example/x", "alpine"):
            await services.images.pull(one, allowed, auth=None, refresh=True)
        for refused in ("evil.test/x", "evil.test:5000/x"):
            with pytest.raises(Forbidden, match=r"evil\.test"):
                await services.images.pull(one, refused, auth=None, refresh=True)
            with pytest.raises(Forbidden):
                await services.creates.create(one, of(refused))
            with pytest.raises(Forbidden):
                await services.images.push(one, "alpine", refused, auth=None)
        await services.images.pull(first, "evil.test/x", auth=None, refresh=True)
    finally:
        await services.stop()


@pytest.mark.parametrize(
    ("reference", "registry"),
    [
        ("alpine", "docker.io"),
        ("library/alpine:3", "docker.io"),
        ("index.docker.io/x", "docker.io"),
        ("localhost/x", "localhost"),
        ("a.b/c@sha256:00", "a.b"),
        ("host:5000/x", "host:5000"),
        ("HOST/x", "HOST"),
    ],
)
def test_registry_of(reference: str, registry: str) -> None:
    assert registry_of(reference) == registry
