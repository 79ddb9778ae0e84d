# SPDX-License-Identifier: AGPL-3.0-only
"""Creating from images and layers: what is resolved, when, and for whom."""

from __future__ import annotations

import msgspec
import pytest

from opendsec_server.contract.errors import (
    IdempotencyMismatch,
    ImageNotFound,
    InvalidRequest,
    NotSupported,
    RegistryUnavailable,
)
from opendsec_server.contract.images import ImageConfig, ReadyCheck, StartCommand
from opendsec_server.control.iam import Caller
from opendsec_server.control.image_names import own_name, shown_names
from opendsec_server.control.params import CreateParams
from opendsec_server.control.saving import SnapshotParams
from opendsec_server.control.services import Services
from opendsec_server.store import accounts
from opendsec_server.store.records import ApiKey, Project, SandboxExtra
from opendsec_server.store.sandboxes import SandboxFilter

from .fake_node import FakeNode

SERVICE = ImageConfig(
    entrypoint=("/bin/serve",),
    cmd=("--port", "80"),
    env={"A": "image", "B": "image"},
    workdir="/srv",
    user="app:app",
)


@pytest.fixture(autouse=True)
def _service(node: FakeNode) -> None:
    node.images.offered["service"] = ({"/bin/serve": "x"}, SERVICE, None)


def asked(image: str | None = None, **extra: object) -> CreateParams:
    return CreateParams(extra=SandboxExtra(image=image, **extra))  # type: ignore[arg-type]


async def test_an_image_is_resolved_once(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    params = msgspec.structs.replace(asked("service"), env={"B": "caller"})
    record = (await services.creates.create(caller, params, key="k")).record
    spec = node.specs[record.sandbox_id]
    assert spec.image == record.image == (await node.images.get("service")).digest
    assert record.template == "service"
    assert spec.env == {"A": "image", "B": "caller"}
    assert (spec.default_user, spec.default_workdir, spec.start) == ("app:app", "/srv", None)
    await services.creates.create(caller, asked("service"))
    assert node.images.pulls == ["service"], "one that is here is enough"
    plain = (await services.creates.create(caller, asked("alpine"))).record
    spec = node.specs[plain.sandbox_id]
    assert (spec.default_user, spec.default_workdir) == ("root", "/")


async def test_a_key_remembers_what_its_tag_meant(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    first = await services.creates.create(caller, asked("service"), key="k")
    node.images.infos.clear()
    node.images.fail_pull = RegistryUnavailable("gone")
    again = await services.creates.create(caller, asked("service"), key="k")
    assert again.replayed
    assert again.record == first.record
    with pytest.raises(IdempotencyMismatch):
        await services.creates.create(caller, asked("alpine"), key="k")
    with pytest.raises(RegistryUnavailable):
        await services.creates.create(caller, asked("service"), key="other")
    wanted = SandboxFilter(project_id=caller.project_id, limit=10)
    assert len((await services.lifecycle.page(wanted)).records) == 1


async def test_the_program_of_an_image(services: Services, node: FakeNode, caller: Caller) -> None:
    ready = ReadyCheck(port=80, timeout_s=5)
    params = asked("service", start_image=True, ready=ready)
    record = (await services.creates.create(caller, params)).record
    expected = StartCommand(
        argv=("/bin/serve", "--port", "80"),
        user="app:app",
        workdir="/srv",
        env={"A": "image", "B": "image"},
        ready=ready,
    )
    assert node.specs[record.sandbox_id].start == expected
    params = msgspec.structs.replace(params, env={"B": "caller"})
    record = (await services.creates.create(caller, params)).record
    start = node.specs[record.sandbox_id].start
    assert start is not None
    assert start.env == {"A": "image", "B": "caller"}
    assert not start.warm, "it is in no memory that others share"


async def test_layers_on_templates_and_images(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    record = (await services.creates.create(caller, asked(layers=("alpine", "service")))).record
    assert record.template == "base"
    disk = node.images.disks[node.specs[record.sandbox_id].image]
    assert disk == {"/etc/os-release": "alpine", "/bin/serve": "x"}
    assert node.specs[record.sandbox_id].default_user == "user"
    record = (await services.creates.create(caller, asked("service", layers=("base",)))).record
    disk = node.images.disks[node.specs[record.sandbox_id].image]
    assert disk == {"/etc/os-release": "debian", "/bin/serve": "x"}, "base is the template"
    assert "base" not in node.images.pulls


@pytest.mark.parametrize(
    "params",
    [
        asked("alpine", start_image=True),
        asked(start_image=True),
        asked("service", ready=ReadyCheck(port=1)),
        asked("packed:other/name:latest"),
        asked(""),
        asked("a\nb"),
        asked("a" * 513),
        asked(layers=("a",) * 65),
        msgspec.structs.replace(asked("alpine"), template="other"),
    ],
)
async def test_what_makes_no_sense(
    services: Services, node: FakeNode, caller: Caller, params: CreateParams
) -> None:
    with pytest.raises(InvalidRequest):
        await services.creates.create(caller, params)
    assert node.created == 0


async def test_an_image_is_not_for_machines_that_boot_disks(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    with pytest.raises(NotSupported):
        await services.creates.create(
            caller, msgspec.structs.replace(asked("alpine"), backend="vm")
        )
    assert node.created == 0


async def test_names_are_a_projects_own(services: Services, node: FakeNode, caller: Caller) -> None:
    mine, theirs = own_name(caller.project_id, "mine"), own_name("another", "theirs:v1")
    image = node.images.add({"/x": "mine"}, names=(mine, theirs))
    record = (await services.creates.create(caller, asked("mine:latest"))).record
    assert record.image == image.digest
    with pytest.raises(ImageNotFound):
        await services.creates.create(caller, asked("theirs:v1"))
    assert shown_names(caller.project_id, (mine, theirs, "docker.io/library/x:1")) == (
        "mine:latest",
        "docker.io/library/x:1",
    )
    for bad in ("", "UPPER", "a/b", "../x", "x:", ":x", "a" * 300, "x:" + "t" * 129, "a b"):
        with pytest.raises(InvalidRequest):
            own_name("p", bad)


async def test_a_digest_opens_nothing(services: Services, node: FakeNode, caller: Caller) -> None:
    # Not the first project, which may see everything.
    project = Project(project_id="late", name="late", sandboxes_max=10, created_at=1e12)
    key = ApiKey(key_id="l", project_id="late", name="", sha256="l", hint="", created_at=1e12)
    await accounts.insert_project(services.store, project, key)
    other = Caller(project=project, key_id="l")
    options = {"squash": False, "scrub": True}
    for owner, stranger in ((caller, other), (other, None)):
        for name in (None, "kept"):
            source = (await services.creates.create(owner, CreateParams())).record
            node.contents[source.sandbox_id].disk["/whose"] = f"{owner.project_id} {name}"
            image = await services.packing.pack(owner, source.sandbox_id, name=name, **options)
            assert image.names == (() if name is None else ("kept:latest",))
            mine = (await services.creates.create(owner, asked(image.digest))).record
            assert mine.image == image.digest
            assert image.digest in [seen.digest for seen in await services.images.list(owner)]
            if stranger is None:
                await services.images.remove(owner, image.digest)
                continue
            for params in (asked(image.digest), asked(layers=(image.digest,))):
                with pytest.raises(ImageNotFound):
                    await services.creates.create(stranger, params)
            for look in (services.images.get, services.images.remove):
                with pytest.raises(ImageNotFound):
                    await look(stranger, image.digest)
            with pytest.raises(ImageNotFound):
                await services.images.push(stranger, image.digest, "registry.example/x", auth=None)
            assert image.digest not in [s.digest for s in await services.images.list(stranger)]


async def test_pack(services: Services, node: FakeNode, caller: Caller) -> None:
    record = (await services.creates.create(caller, CreateParams())).record
    options = {"squash": False, "scrub": True}
    image = await services.packing.pack(caller, record.sandbox_id, name=None, **options)
    assert image.digest in node.images.infos
    with pytest.raises(InvalidRequest):
        await services.packing.pack(caller, record.sandbox_id, name="a/b", **options)


async def test_a_snapshot_keeps_the_images_environment(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    source = (await services.creates.create(caller, asked("service"))).record
    saved = (
        await services.saving.snapshot(caller, source.sandbox_id, SnapshotParams(mode="filesystem"))
    ).snapshot
    record = (
        await services.creates.create(caller, CreateParams(template=saved.snapshot_id))
    ).record
    assert node.specs[record.sandbox_id].env == {"A": "image", "B": "image"}
