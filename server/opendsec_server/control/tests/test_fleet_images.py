# SPDX-License-Identifier: AGPL-3.0-only
"""Images over several nodes, each with a store of its own."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from opendsec_server.config import Config
from opendsec_server.contract.errors import ImageNotFound, NodeFull, TemplateNotFound
from opendsec_server.contract.images import ImageConfig, ImageInfo, PackOptions, RegistryAuth
from opendsec_server.contract.node import SandboxSpec, SandboxStatus
from opendsec_server.control.nodes import Fleet, NodeSource
from opendsec_server.control.params import CreateParams
from opendsec_server.control.services import Services
from opendsec_server.store.records import SandboxExtra

from .conftest import first_caller
from .fake_images import FakeImages
from .fake_node import FakeNode

NAME = "docker.io/library/alpine:3.20"
SOURCE = "sha256:" + "5" * 64
PINNED = f"docker.io/library/alpine@{SOURCE}"


class Store(FakeImages):
    """A store that says where its images came from, and pulls them by digest too."""

    def __init__(self) -> None:
        super().__init__()
        self.offered[NAME] = self.offered[PINNED] = ({"/a": "1"}, ImageConfig(), None)

    async def pull(
        self, reference: str, *, auth: RegistryAuth | None = None, refresh: bool = True
    ) -> ImageInfo:
        image = await super().pull(reference, auth=auth, refresh=refresh)
        self.infos[image.digest] = image = msgspec.structs.replace(image, source=SOURCE)
        return image


class Node(FakeNode):
    """A node that has no image which it did not get."""

    def __init__(self, node_id: str) -> None:
        super().__init__(node_id=node_id)
        self.images = Store()

    async def create(self, spec: SandboxSpec) -> SandboxStatus:
        try:
            await self.images.get(spec.image)
        except ImageNotFound as exc:
            raise TemplateNotFound(f"{spec.image} is not on this node") from exc
        return await super().create(spec)


@pytest.fixture
def nodes() -> list[Node]:
    return [Node(f"n{n}de") for n in range(3)]


@pytest_asyncio.fixture
async def services(config: Config, nodes: list[Node]) -> AsyncIterator[Services]:
    fleet = Fleet(
        [NodeSource(name=node.node_id, client=node) for node in nodes], rng=random.Random(1)
    )
    started = await Services.start(config, fleet)
    yield started
    await started.stop()


def of_image(image: str) -> CreateParams:
    """A sandbox of an image."""
    return CreateParams(template="base", extra=SandboxExtra(image=image))


async def test_a_node_that_lacks_an_image_pulls_what_the_first_one_pulled(
    services: Services, nodes: list[Node]
) -> None:
    caller = await first_caller(services)
    for _ in range(12):
        await services.creates.create(caller, of_image(NAME))
    assert all(node.created for node in nodes), "it goes where there is room, not where it was"
    pulls = [pull for node in nodes for pull in node.images.pulls]
    assert sorted(pulls) == sorted([NAME, PINNED, PINNED])
    assert {spec.image for node in nodes for spec in node.specs.values()} == {
        next(iter(nodes[0].specs.values())).image
    }
    (shown,) = [image for image in await services.images.list(caller) if NAME in image.names]
    await services.images.remove(caller, shown.digest)
    assert all(shown.digest not in node.images.infos for node in nodes)
    with pytest.raises(ImageNotFound):
        await services.images.get(caller, NAME)


async def test_an_image_that_no_registry_has_is_used_where_it_was_packed(
    services: Services, nodes: list[Node]
) -> None:
    caller = await first_caller(services)
    made = (await services.creates.create(caller, CreateParams())).record
    home = next(node for node in nodes if node.node_id == made.node_id)
    home.contents[made.sandbox_id].disk["/mine"] = "1"
    name = f"{caller.project_id}/mine:latest"
    image = await services.node.pack(made.sandbox_id, PackOptions(name=name))
    origin = of_image(image.digest)
    for _ in range(6):
        created = await services.creates.create(caller, origin)
        assert created.record.node_id == home.node_id
    home.draining = True
    await services.fleet.mark(services.fleet.member(home.node_id), draining=True)
    with pytest.raises(NodeFull):
        await services.creates.create(caller, origin)
    assert sum(node.created for node in nodes) == 7


async def test_an_image_that_only_its_caller_could_pull_is_used_where_it_is(
    services: Services, nodes: list[Node]
) -> None:
    """The other nodes have no credentials: they are no worse for it, and nothing fails."""
    caller = await first_caller(services)
    login = RegistryAuth(username="u", password="right-one")
    for node in nodes:
        for name in (NAME, PINNED):
            node.images.offered[name] = ({"/secret": "1"}, ImageConfig(), login)
    pulled = await services.images.pull(caller, NAME, auth=login, refresh=True)
    (home,) = [node for node in nodes if pulled.digest in node.images.infos]
    for _ in range(9):
        created = await services.creates.create(caller, of_image(pulled.digest))
        assert created.record.node_id == home.node_id
    assert sum(len(node.images.pulls) for node in nodes) <= 3
    elsewhere = [await services.creates.create(caller, CreateParams()) for _ in range(12)]
    others = {node.node_id for node in nodes} - {home.node_id}
    assert others <= {created.record.node_id for created in elsewhere}
