# SPDX-License-Identifier: AGPL-3.0-only
"""Images from a real registry, by the command line and the SDK of a real server."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest

from opendsec import Client, OpendsecError, RegistryDenied, RegistryLimited
from opendsec import RegistryAuth as Login
from opendsec_server.images.tests.registries import (
    PASSWORD,
    USER,
    Answer,
    Entry,
    Registry,
    fault_proxy,
    files,
    make_layout,
    running_registry,
    tar_of,
)
from tests.harness import BIN, Server

BUSYBOX = Path("/bin/busybox")
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(base_url=server.url, api_key=server.api_key) as client:
        yield client


@pytest.fixture
def cli(server: Server) -> Run:
    def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(BIN / "opendsec"), *arguments],
            env=server.client_environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


def busybox_layer() -> bytes:
    """A system of one program."""
    if not BUSYBOX.exists():
        pytest.skip("busybox-static is not installed")
    return tar_of(
        [
            Entry("bin/busybox", BUSYBOX.read_bytes(), mode=0o755),
            Entry("bin/sh", kind=tarfile.SYMTYPE, link="busybox"),
            Entry("tmp", kind=tarfile.DIRTYPE, mode=0o1777),
        ]
    )


def half_made(server: Server) -> list[Path]:
    folder = server.config.state_path / "images/pulls"
    return list(folder.iterdir()) if folder.is_dir() else []


def test_pull_run_and_remove(
    cli: Run, client: Client, server: Server, registry: Registry, tmp_path: Path
) -> None:
    make_layout(tmp_path / "l", [busybox_layer(), files(hello="world")], {"Env": ["A=image"]})
    reference = registry.push(tmp_path / "l", "e2e/busybox:1")
    pulled = cli("image", "pull", reference)
    assert pulled.returncode == 0, pulled.stderr
    digest = pulled.stdout.strip()
    listed = json.loads(cli("image", "ls", "--json").stdout)
    (mine,) = [image for image in listed if image["digest"] == digest]
    assert mine["names"] == [reference]
    inspected = json.loads(cli("image", "inspect", digest[7:19]).stdout)
    assert inspected["config"]["env"] == {"A": "image"}
    assert digest[7:19] in cli("image", "ls").stdout

    done = cli("run", "--image", reference, "sh", "-c", "busybox cat /hello; busybox echo $A")
    assert done.stdout == "worldimage\n", done.stderr

    with client.create(image=reference) as sandbox:
        assert sandbox.info().state == "running"
        refused = cli("image", "rm", reference)
        assert (refused.returncode, "image_in_use" in refused.stderr) == (1, True)
        assert digest not in cli("image", "prune").stdout.split()
    removed = cli("image", "rm", reference)
    assert removed.returncode == 0, removed.stderr
    gone = cli("image", "inspect", digest, "--json")
    assert json.loads(gone.stderr)["error"]["code"] == "image_not_found"
    layers = server.config.state_path / "images/layers"
    assert not {path.name for path in layers.iterdir()} & set(mine["layers"])
    # And once more, since all of it is gone.
    assert cli("run", "--image", reference, "sh", "-c", "busybox cat /hello").stdout == "world"


def test_people_see_how_far_a_pull_is(server: Server, registry: Registry, tmp_path: Path) -> None:
    make_layout(tmp_path / "l", [busybox_layer(), files(slow="s")])
    registry.push(tmp_path / "l", "e2e/slow:1")

    def wait(answer: Answer) -> bool:
        if "/blobs/" in answer.path:
            time.sleep(1.5)
        return False

    with fault_proxy(registry.host) as proxy:
        proxy.fault = wait
        child = pexpect.spawn(
            str(BIN / "opendsec"),
            ["image", "pull", f"{proxy.host}/e2e/slow:1"],
            env={**server.client_environment, "TERM": "xterm"},
            encoding="utf-8",
            timeout=60,
        )
        child.expect(r"Pulling \S+/e2e/slow:1: \d+ of 2 layers, [\d.]+ \w+ of [\d.]+ \w+")
        child.expect("sha256:[0-9a-f]{64}")
        child.expect(pexpect.EOF)
        child.close()
        assert child.exitstatus == 0


def test_push_and_pull_back(cli: Run, registry: Registry, tmp_path: Path) -> None:
    make_layout(tmp_path / "l", [busybox_layer()])
    reference = registry.push(tmp_path / "l", "e2e/push:1")
    digest = cli("image", "pull", reference).stdout.strip()
    pushed = cli("image", "push", digest, f"{registry.host}/e2e/pushed:1", "--json")
    assert pushed.returncode == 0, pushed.stderr
    back = cli("image", "pull", f"{registry.host}/e2e/pushed:1", "--json")
    assert json.loads(back.stdout)["digest"] == digest
    assert json.loads(back.stdout)["source"] == json.loads(pushed.stdout)["digest"]


def test_credentials(cli: Run, client: Client, server: Server, tmp_path: Path) -> None:
    make_layout(tmp_path / "l", [files(a="1")])
    with running_registry(tmp_path / "closed", auth=True) as closed:
        reference = closed.push(tmp_path / "l", "e2e/private:1")
        with pytest.raises(RegistryDenied):
            client.images.pull(reference)
        assert client.images.pull(reference, auth=Login(username=USER, password=PASSWORD)).layers
        pulled = cli(
            "image", "pull", reference, "-u", USER, "--password-stdin", stdin=PASSWORD + "\n"
        )
        assert pulled.returncode == 0, pulled.stderr
    assert PASSWORD not in server.log_tail(100_000)


def test_refusals_reach_the_client(client: Client, registry: Registry) -> None:
    with fault_proxy(registry.host) as proxy:
        proxy.fault = lambda answer: answer.refuse(429, {"Retry-After": "33"})
        with pytest.raises(RegistryLimited) as raised:
            client.images.pull(f"{proxy.host}/e2e/any:1")
    assert raised.value.retry_after_s == 33


def test_server_killed_in_the_middle_of_a_pull(
    client: Client, server: Server, registry: Registry, tmp_path: Path
) -> None:
    make_layout(tmp_path / "l", [files(first="1"), tar_of([Entry("big", os.urandom(1 << 20))])])
    registry.push(tmp_path / "l", "e2e/killed:1")
    layers = server.config.state_path / "images/layers"
    before = set(layers.iterdir())
    reached = threading.Event()
    let_go = threading.Event()

    def hang(answer: Answer) -> bool:
        """Blobs after the first two (configuration, and a layer) never come."""
        if answer.command == "GET" and "/blobs/" in answer.path and len(proxy.blobs()) > 2:
            reached.set()
            let_go.wait(60)
        return False

    with fault_proxy(registry.host) as proxy:
        proxy.fault = hang
        reference = f"{proxy.host}/e2e/killed:1"
        failures: list[Exception] = []

        def pull() -> None:
            try:
                client.images.pull(reference)
            except OpendsecError as exc:
                failures.append(exc)

        thread = threading.Thread(target=pull)
        thread.start()
        assert reached.wait(30)
        until = time.monotonic() + 30
        while set(layers.iterdir()) <= before:
            assert time.monotonic() < until
            time.sleep(0.05)
        server.kill_daemon()
        thread.join(30)
        assert failures, "the caller is told"
        until = time.monotonic() + 10
        while _programs(proxy.host) and time.monotonic() < until:
            time.sleep(0.1)
        assert not _programs(proxy.host), "nothing of the pull goes on"
        proxy.fault = None
        let_go.set()
        server.start()
        assert not half_made(server)
        assert reference not in {n for image in client.images.list() for n in image.names}
        whole = proxy.blobs()[1]
        proxy.requests.clear()
        image = client.images.pull(reference)
        assert len(image.layers) == 2
        assert whole not in proxy.blobs(), "what was whole is not sent again"
        assert not half_made(server)


def _programs(text: str) -> list[str]:
    """Command lines that hold a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if "skopeo" in command or (text in command and "pytest" not in command):
            found.append(command)
    return found


def test_compiled_modules_of_base_are_used(client: Client) -> None:
    with client.create() as sandbox:
        said = sandbox.exec("python3 -v -c 'import json' 2>&1")
    assert "matches" in said.stdout
    assert "stale" not in said.stdout
