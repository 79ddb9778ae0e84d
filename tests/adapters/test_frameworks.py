# SPDX-License-Identifier: AGPL-3.0-only
"""The adapters, with the frameworks that they are for.

Those have hundreds of packages, some of which contradict ours: so they live in ``.venv-adapters``,
and the tests that use them, in ``inside``, run there, against the server of this folder. All of
them run at once, since they wait most of the time.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tarfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec import BuildStep, Client
from opendsec_server.images.tests.registries import Entry, make_layout, running_registry, tar_of
from tests.harness import BIN, Server

INSIDE = Path(__file__).parent / "inside"
PYTHON = Path(__file__).parents[2] / ".venv-adapters/bin/python"
TIMEOUT_S = 280
PACKED = "packed-for-harbor:1"

FRAMEWORKS = {
    # Name of the tests: package they need, how many have to pass.
    "inspect": ("inspect_ai", 48),
    "swerex": ("swerex", 9),
    "mcp": ("mcp", 3),
    "gymnasium": ("gymnasium", 4),
    "harbor": ("harbor", 7),
}


def has(package: str) -> bool:
    """Whether the environment of the frameworks has a package; most take long to import."""
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
    return subprocess.run([PYTHON, "-c", code], check=False).returncode == 0


def small_system() -> bytes:
    """A layer of one program under all its names. Harbor needs a bash besides."""
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("the package busybox-static is not installed")
    names = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True)
    entries = [Entry("bin/busybox", Path(busybox).read_bytes(), mode=0o755)]
    entries += [Entry(f"bin/{name}", kind=tarfile.SYMTYPE, link="busybox")
                for name in names.stdout.split() if name != "busybox"]  # fmt: skip
    entries.append(Entry("bin/bash", b'#!/bin/sh\nexec sh "$@"\n', mode=0o755))
    entries.append(Entry("tmp", kind=tarfile.DIRTYPE, mode=0o1777))
    return tar_of(entries)


@pytest.fixture(scope="module")
def images(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What Harbor's tasks begin with: an image in a registry, and one that the server has."""
    with (
        running_registry(tmp_path_factory.mktemp("registry")) as registry,
        Client(base_url=server.url, api_key=server.api_key) as client,
    ):
        layout = tmp_path_factory.mktemp("layout")
        make_layout(layout, [small_system()], {"Env": ["PATH=/bin"]})
        reference = registry.push(layout, "small:1")
        client.templates.build(
            "as-root", from_template="base", steps=[BuildStep(type="USER", args=("root",))]
        )
        with client.create("as-root", memory_mb=64) as sandbox:
            sandbox.pack(PACKED)
        yield {"BASE_IMAGE": reference, "PACKED_IMAGE": PACKED}


@pytest.fixture(scope="module")
def running(
    server: Server, images: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """The tests of each framework that is there, begun."""
    if not PYTHON.exists():
        pytest.skip("there is no .venv-adapters: run scripts/adapters-venv")
    folder = tmp_path_factory.mktemp("frameworks")
    with contextlib.ExitStack() as stack:
        begun = {}
        for name, (package, _count) in FRAMEWORKS.items():
            if not has(package):
                continue
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            begun[name] = subprocess.Popen(
                [
                    PYTHON, "-m", "pytest", "-q", "-c", INSIDE / "pytest.ini",
                    f"--junit-xml={folder / name}.xml", f"--basetemp={folder / name}",
                    INSIDE / f"check_{name}.py",
                ],
                # Harbor's LiteLLM would look for a newer list of prices on the internet.
                env={
                    **server.client_environment,
                    **images,
                    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
            begun[name].folder = folder  # type: ignore[attr-defined]
        try:
            yield begun
        finally:
            for process in begun.values():
                process.kill()
                process.wait()


@pytest.mark.timeout(TIMEOUT_S + 120)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_adapter(running: dict[str, subprocess.Popen[bytes]], name: str) -> None:
    package, count = FRAMEWORKS[name]
    if name not in running:
        pytest.skip(f"NOT TESTED: {package} is not in .venv-adapters (Harbor needs Python 3.12)")
    process = running[name]
    folder: Path = process.folder  # type: ignore[attr-defined]
    code = process.wait(timeout=TIMEOUT_S)
    words = (folder / f"{name}.log").read_text(errors="replace")
    assert code == 0, words
    suite = ElementTree.parse(folder / f"{name}.xml").getroot().find("testsuite")
    assert suite is not None
    assert suite.get("skipped") == "0", words
    assert int(suite.get("tests", "0")) == count, words


def test_without_the_package_the_command_says_which(server: Server) -> None:
    # Our own environment has the command, but not the package.
    run = subprocess.run(
        [BIN / "opendsec", "mcp"],
        env=server.client_environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 1
    assert "pip install 'opendsec[mcp]'" in run.stderr
