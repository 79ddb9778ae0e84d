# SPDX-License-Identifier: AGPL-3.0-only
"""Images on demand by the command lines of a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec import Client, OpendsecError
from opendsec_server.images.tests.lazy_store import lazy_store
from tests.harness import Server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(base_url=server.url, api_key=server.api_key) as client:
        yield client


def test_publish_attach_start(server: Server, client: Client, tmp_path: Path) -> None:
    told = server.opendsecd("image", "publish", "base", str(tmp_path / "web")).stdout
    digest = told.split()[0]
    with lazy_store(tmp_path / "web") as web:
        attached = server.opendsecd("image", "attach", f"{web.url}@{digest}", "--name", "remote")
        assert digest in attached.stdout
        wrong = server.opendsecd("image", "attach", f"{web.url}@sha256:{'0' * 64}", check=False)
        assert wrong.returncode != 0
        assert "another digest" in wrong.stderr
        with pytest.raises(OpendsecError) as refused:
            client.images.pull(f"lazy+{web.url}")
        assert refused.value.code == "forbidden"
        sandbox = client.create(image=digest)
        try:
            assert sandbox.exec(["/bin/sh", "-c", "echo $((6*7))"]).stdout == "42\n"
            image = client.images.get(digest)
            assert 0 < image.fetched_bytes < image.on_demand_bytes / 2
            pid = server.daemon()
            server.stop()
            server.start()
            assert server.daemon() != pid
            assert sandbox.exec(["/bin/sh", "-c", "ls /usr | head -n 1"]).exit_code == 0
        finally:
            client.kill(sandbox.sandbox_id)
        client.images.delete(digest)
    assert not list((server.config.state_path / "images/layers").glob("*/served"))
