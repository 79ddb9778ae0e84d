# SPDX-License-Identifier: AGPL-3.0-only
"""Images: cold pull and first start against docker, a second start, and space.

    sudo .venv/bin/python -m bench.images [--docker] [--count 3] [--images 50]

- cold pull and first command: an image of the template ``base``'s files in three layers, from a
  registry on loopback, until its first command has ended; with ``--docker``, ``docker pull`` and
  ``docker run`` of the same image from the same registry, in turns, by a private dockerd. Before
  each the caches of the file system are dropped.
- second start: create and first command of an image that is here, against ``base``.
- space: images that share a base and have 1 MiB of their own, against as many unpacked trees
  (one of the layers above).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from bench.docker import docker_daemon, mounted
from bench.server import bench_server
from bench.stats import Result, print_ratio, print_results, summarise, write_json
from opendsec import Client
from opendsec_server.images.store import ImageStore
from opendsec_server.images.tests.registries import (
    Entry,
    Registry,
    make_layout,
    running_registry,
    tar_of,
)
from tests.harness import Server

_PARTS = (("usr/lib/x86_64-linux-gnu",), ("usr/share", "usr/bin"), ())
"""What goes into which layer; the last has the rest. Roughly thirds."""
_MIB = 1 << 20


def tars_of(tree: Path) -> list[bytes]:
    """The tree as tars of a few layers."""
    tars = []
    taken = [path for part in _PARTS for path in part]
    for part in _PARTS:
        inside = [f"./{path}" for path in part if (tree / path).exists()]
        left_out = [] if part else [f"--exclude=./{path}" for path in taken]
        argv = ["tar", "--format=pax", "-C", str(tree), *left_out, "-c", *(inside or ["."])]
        tars.append(subprocess.run(argv, check=True, capture_output=True).stdout)
    return tars


def drop_caches() -> None:
    """Nothing is in memory that a first pull would have to read or write."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def cold_ours(client: Client, reference: str) -> tuple[float, float]:
    """Seconds of the pull, and until the first command of a sandbox of it has ended."""
    drop_caches()
    started = time.perf_counter()
    image = client.images.pull(reference)
    pulled = time.perf_counter() - started
    sandbox = client.create(image=reference)
    assert sandbox.exec(["/bin/true"]).exit_code == 0
    whole = time.perf_counter() - started
    sandbox.kill()
    client.images.delete(image.digest)
    return pulled, whole


def cold_docker(docker: list[str], reference: str) -> tuple[float, float]:
    """The same by docker."""
    drop_caches()
    started = time.perf_counter()
    subprocess.run([*docker, "pull", "--quiet", reference], check=True, capture_output=True)
    pulled = time.perf_counter() - started
    run = [*docker, "run", "--rm", "--network", "none", reference, "/bin/true"]
    subprocess.run(run, check=True, capture_output=True)
    whole = time.perf_counter() - started
    subprocess.run([*docker, "rmi", reference], check=True, capture_output=True)
    return pulled, whole


def cold(client: Client, reference: str, count: int, host: str, docker: bool) -> list[Result]:
    """Both in turns, so that a noisy machine is noisy for both."""
    series: dict[str, list[float]] = {}

    def note(name: str, times: tuple[float, float]) -> None:
        series.setdefault(f"{name}: pull", []).append(times[0])
        series.setdefault(f"{name}: pull and first command", []).append(times[1])

    with contextlib.ExitStack() as stack:
        command = stack.enter_context(docker_daemon(host)) if docker else None
        for _ in range(count):
            note("ours", cold_ours(client, reference))
            if command is not None:
                note("docker", cold_docker(command, reference))
    return [summarise(name, 1, times) for name, times in series.items()]


def second_starts(client: Client, reference: str, count: int) -> list[Result]:
    """Create and first command, of an image that is here and of ``base``, in turns."""
    client.images.pull(reference)
    series: dict[str, list[float]] = {"image": [], "base": []}
    origins: dict[str, dict[str, str]] = {"image": {"image": reference}, "base": {}}
    for _ in range(count):
        for name, origin in origins.items():
            started = time.perf_counter()
            sandbox = client.create(**origin)  # type: ignore[arg-type]
            assert sandbox.exec(["/bin/true"]).exit_code == 0
            series[name].append(time.perf_counter() - started)
            sandbox.kill()
    return [summarise(f"second start: {name}", 1, times) for name, times in series.items()]


def space(
    server: Server, client: Client, registry: Registry, base: bytes, count: int
) -> tuple[int, int]:
    """Bytes on the disk of so many images of a base and something of their own, and of so many
    unpacked trees."""
    store = ImageStore(server.config.state_path / "images")
    layers: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="opendsec-bench-layout-", dir="/var/tmp") as folder:
        layout = Path(folder)
        for number in range(count):
            own = tar_of([Entry(f"own-{number}", os.urandom(_MIB))])
            make_layout(layout / str(number), [base, own])
            image = client.images.pull(registry.push(layout / str(number), f"space/{number}:1"))
            layers.update(image.layers)
            shutil.rmtree(layout / str(number))
    return sum(map(store.layer_bytes, layers)), count * (len(base) + _MIB)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docker", action="store_true", help="compare with docker too (dockerd)")
    parser.add_argument("--count", type=int, default=3, help="cold pulls")
    parser.add_argument("--images", type=int, default=50, help="images that share a base; 0: none")
    parser.add_argument("--json")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="opendsec-bench-registry-", dir="/var/tmp") as folder,
        running_registry(Path(folder) / "registry") as registry,
        bench_server() as server,
        Client(base_url=server.url, api_key=server.api_key) as client,
    ):
        store = ImageStore(server.config.state_path / "images")
        with mounted(store.layer_path(store.find("base").layers[0])) as tree:
            tars = tars_of(tree)
        make_layout(Path(folder) / "layout", tars, {"Env": ["PATH=/usr/bin:/bin"]})
        reference = registry.push(Path(folder) / "layout", "bench/image:1")
        sent = sum(p.stat().st_size for p in (Path(folder) / "layout/blobs/sha256").iterdir())
        print(f"image: {sum(map(len, tars)) >> 20} MiB unpacked, {sent >> 20} MiB as it is sent")
        results = cold(client, reference, options.count, registry.host, options.docker)
        results += second_starts(client, reference, 10 * options.count)
        ours = trees = 0
        if options.images:
            ours, trees = space(server, client, registry, tars[1], options.images)
    print_results(results)
    p50 = {result.name: result.p50_ms for result in results}
    if options.docker:
        print_ratio(
            "cold pull and first command: ours / docker",
            p50["ours: pull and first command"],
            p50["docker: pull and first command"],
            "at most 0.7x",
        )
    print_ratio(
        "second start: image / base", p50["second start: image"], p50["second start: base"],
        "as fast",
    )  # fmt: skip
    if options.images:
        print(f"{options.images} images: {ours >> 20} MiB; unpacked trees: {trees >> 20} MiB")
        print_ratio("space: images / unpacked trees", ours, trees, "lower is better")
    write_json(options.json, results, space_bytes=ours, trees_bytes=trees)


if __name__ == "__main__":
    main()
