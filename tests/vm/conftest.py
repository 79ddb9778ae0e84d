# SPDX-License-Identifier: AGPL-3.0-only
"""A server with disk images, and one machine that the tests share: each boot of a distribution
takes most of a minute where guests are emulated."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec import Client, Sandbox
from tests.harness import Server, new_server
from tests.leaks import Snapshot

from .image import CloudImage, ensure_image, missing_programs

HERE = Path(__file__).parent
START_TIMEOUT_S = 900
CMDLINE = "root=LABEL=cloudroot rw console=tty0 console=ttyS0,115200 net.ifnames=0 quiet"
USER_DATA = """\
#cloud-config
write_files:
  - {path: /etc/from-user-data, content: "yes"}
runcmd:
  - [touch, /run/user-data-ran]
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They take minutes: the last of all, with time for it."""
    ours = [item for item in items if HERE in Path(str(item.path)).parents]
    for item in ours:
        item.add_marker(pytest.mark.e2e)
        item.add_marker(pytest.mark.slow)
        item.add_marker(pytest.mark.timeout(START_TIMEOUT_S))
    others = [item for item in items if item not in ours]
    items[:] = others + ours


@pytest.fixture(scope="session")
def cloud_image() -> CloudImage:
    """A disk image with cloud-init; built when it is not there."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    missing = missing_programs()
    if missing:
        pytest.skip(f"a disk image cannot be built: {', '.join(missing)} not installed")
    return ensure_image(lambda line: print(f"vm tests: {line}", flush=True))


@pytest.fixture(scope="session")
def server(cloud_image: CloudImage) -> Iterator[Server]:
    """Knows the image by three names: ``cloud`` (qcow2, by BIOS), ``cloud-uefi`` and
    ``cloud-direct``."""
    for program in ("qemu-system-x86_64", "xorriso"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: no full virtual machines")
    server = new_server("vmt", "10.218.0.0/16", passthrough_devices=["0000:00:1f.0"])
    before = Snapshot.take("vmt", (server.root,))
    try:
        add = ("image", "import")
        server.opendsecd(*add, "cloud", str(cloud_image.qcow2))
        server.opendsecd(*add, "cloud-uefi", str(cloud_image.raw), "--firmware", "uefi")
        server.start()
        # While it runs, too.
        server.opendsecd(
            *add, "cloud-direct", str(cloud_image.raw), "--kernel", str(cloud_image.kernel),
            "--initrd", str(cloud_image.initrd), "--cmdline", CMDLINE,
        )  # fmt: skip
        yield server
    finally:
        server.purge()
    before.assert_nothing_new()


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[Client]:
    """A client of it."""
    with Client(base_url=server.url, api_key=server.api_key) as client:
        yield client


class Maker:
    """Makes machines by the plain API, and remembers them."""

    def __init__(self, server: Server, client: Client) -> None:
        self._server = server
        self._client = client
        self._made: list[str] = []

    def __call__(self, template: str, **fields: object) -> Sandbox:
        """A machine that runs. Its answer is awaited as long as an emulated boot may take."""
        body = {"template": template, "cpu": 2, "memory_mb": 512, "timeout_s": 3_600, **fields}
        status, answer = self._server.request_json(
            "POST", "/v1/sandboxes", body, timeout_s=START_TIMEOUT_S
        )
        assert status == 201, answer
        self._made.append(answer["sandbox_id"])
        return self._client.connect(answer["sandbox_id"], timeout_s=3_600)

    def forget(self) -> None:
        """End them."""
        for sandbox_id in self._made:
            self._server.request("DELETE", f"/v1/sandboxes/{sandbox_id}")


@pytest.fixture(scope="session")
def make(server: Server, client: Client) -> Iterator[Maker]:
    """Makes machines that end with the tests."""
    maker = Maker(server, client)
    yield maker
    maker.forget()


@pytest.fixture(scope="session")
def machine(make: Maker) -> Sandbox:
    """One machine, booted by BIOS from a qcow2 image, with two more disks."""
    return make(
        "cloud",
        vm={"user_data": USER_DATA, "disks": [{"size_mb": 64}, {"image": "cloud"}]},
    )
