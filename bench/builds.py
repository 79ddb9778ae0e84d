# SPDX-License-Identifier: AGPL-3.0-only
"""Builds of templates: ten steps, all of them and after a change of one, against docker.

    sudo .venv/bin/python -m bench.builds [--docker] [--count 3]

The image that they begin with has the files of the template ``base`` and is pulled beforehand. Each
step writes 1 MiB. First all ten run; then the sixth is another one, so that five are known and five
run; then nothing has changed. With ``--docker``, ``docker build`` of the same file follows.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.docker import docker_daemon, mounted
from bench.images import tars_of
from bench.server import bench_server
from bench.stats import Result, print_ratio, print_results, summarise, write_json
from opendsec import Client
from opendsec_server.images.store import ImageStore
from opendsec_server.images.tests.registries import make_layout, running_registry

STEPS = 10
CHANGED = 6

Build = Callable[[str], None]
"""Builds a Dockerfile's text."""


def dockerfile(reference: str, run: int, sixth: str) -> str:
    """Ten steps; no other run of the benchmark has the same."""
    lines = [f"FROM {reference}"]
    for number in range(1, STEPS + 1):
        word = f"{run} {sixth}" if number == CHANGED else f"{run}"
        lines.append(f"RUN head -c 1M /dev/zero >/step{number} && echo {word} >>/step{number}")
    return "\n".join(lines) + "\n"


def timed(build: Build, text: str) -> float:
    """Seconds of one build."""
    started = time.perf_counter()
    build(text)
    return time.perf_counter() - started


def docker_build(docker: list[str], folder: Path) -> Build:
    """The classic builder, without a network."""

    def build(text: str) -> None:
        (folder / "Dockerfile").write_text(text)
        command = [*docker, "build", "--quiet", "--network", "none", "--tag", "bench", str(folder)]
        subprocess.run(command, check=True, capture_output=True)

    return build


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docker", action="store_true", help="compare with docker too (dockerd)")
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--json")
    options = parser.parse_args()
    series: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="opendsec-bench-builds-", dir="/var/tmp")
        )
        folder = Path(scratch)
        registry = stack.enter_context(running_registry(folder / "registry"))
        server = stack.enter_context(bench_server())
        client = stack.enter_context(Client(base_url=server.url, api_key=server.api_key))
        store = ImageStore(server.config.state_path / "images")
        with mounted(store.layer_path(store.find("base").layers[0])) as tree:
            make_layout(folder / "layout", tars_of(tree), {"Env": ["PATH=/usr/bin:/bin"]})
        reference = registry.push(folder / "layout", "bench/base:1")
        client.images.pull(reference)
        (folder / "context").mkdir()

        def ours(text: str) -> None:
            client.templates.build("bench", dockerfile=text)

        builders: dict[str, Build] = {"ours": ours}
        if options.docker:
            docker = stack.enter_context(docker_daemon(registry.host))
            subprocess.run([*docker, "pull", "--quiet", reference], check=True, capture_output=True)
            builders["docker"] = docker_build(docker, folder / "context")
        for run in range(options.count):
            for what, sixth in (("all ten", "a"), ("sixth changed", "b"), ("unchanged", "b")):
                for name, build in builders.items():
                    took = timed(build, dockerfile(reference, run, sixth))
                    series.setdefault(f"{name}: {what}", []).append(took)
    results: list[Result] = [summarise(name, 1, times) for name, times in series.items()]
    print_results(results)
    if options.docker:
        p50 = {result.name: result.p50_ms for result in results}
        for what in ("all ten", "sixth changed", "unchanged"):
            print_ratio(
                f"{what}: ours / docker", p50[f"ours: {what}"], p50[f"docker: {what}"], "at most 1x"
            )
    write_json(options.json, results)


if __name__ == "__main__":
    main()
