# SPDX-License-Identifier: AGPL-3.0-only
"""Images on demand: time to the first command, and bytes fetched, against a full fetch.

    sudo .venv/bin/python -m bench.lazy [--mb 1024] [--mb-per-s 100] [--latency-ms 10] [--count 3]

An image of ``base`` with files of random bytes on top, of which the command reads 5 % of the image:
whole files, as a program's start does. The store is a web server on loopback, slowed down to the
given rate (of all answers together) and latency.

- full: the layers are fetched whole from the same store (by one request each, checked by SHA-256,
  taken into the store), then create and the command;
- on demand: attach, create and the command;
- with trace: the same, with the order of the first start recorded.

Before each the image is removed from the node and the caches of the file system are dropped.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

from bench.images import drop_caches
from bench.server import bench_server
from bench.stats import Result, print_ratio, print_results, summarise, write_json
from opendsec import Client
from opendsec_server.contract.images import ImageConfig
from opendsec_server.images import lazy
from opendsec_server.images.store import Image, ImageStore
from opendsec_server.images.tests.lazy_store import LazyStore, lazy_store

_FILE_BYTES = 2 << 20
_READ_SHARE = 0.05
_TRACE_S = 75


def big_layer(store: ImageStore, megabytes: int) -> str:
    """A layer of files that do not compress; its digest."""
    with tempfile.TemporaryDirectory(prefix="opendsec-bench-", dir="/var/tmp") as folder:
        tree = Path(folder, "tree/data")
        tree.mkdir(parents=True)
        Path(folder, "tree").chmod(0o755)
        for at in range((megabytes << 20) // _FILE_BYTES):
            (tree / f"{at:04}").write_bytes(os.urandom(_FILE_BYTES))
        layer = Path(folder, "layer")
        argv = ["mkfs.erofs", "-d0", "-zlz4", str(layer), str(tree.parent)]
        subprocess.run(argv, check=True, capture_output=True)
        return store.adopt(layer)


def command(files: int) -> list[str]:
    """Reads every so manieth file."""
    step = max(1, round(1 / _READ_SHARE))
    script = f"for n in $(seq -f %04g 0 {step} {files - 1}); do cat /data/$n; done | wc -c"
    return ["/bin/sh", "-c", script]


def first_command(client: Client, digest: str, argv: list[str]) -> None:
    """Create and the command."""
    sandbox = client.create(image=digest)
    done = sandbox.exec(argv)
    assert done.exit_code == 0, done
    sandbox.kill()


def full(client: Client, store: ImageStore, web: LazyStore, image: Image, argv: list[str]) -> float:
    """Seconds of a full fetch and the first command."""
    drop_caches()
    started = time.perf_counter()
    with store.scratch("bench") as scratch, store.holding() as hold:
        layers = []
        for at, path in enumerate(sorted((web.root / "layers").glob("*.erofs"))):
            urllib.request.urlretrieve(f"{web.url}/layers/{path.name}", scratch / str(at))
            layers.append(store.adopt(scratch / str(at), hold=hold))
        ordered = [layer for layer in image.layers if layer in layers]
        assert len(ordered) == len(image.layers)
        digest = store.put(ordered, image.config).digest
    first_command(client, digest, argv)
    whole = time.perf_counter() - started
    client.images.delete(digest)
    return whole


def on_demand(
    client: Client, store: ImageStore, web: LazyStore, argv: list[str], keep_s: float = 0
) -> tuple[float, int, int]:
    """Seconds of attach and the first command; bytes that the store sent; length of the image.

    Args:
        client: Of the server.
        store: Its images.
        web: The store.
        argv: The command.
        keep_s: Wait so many seconds before the image is removed: a trace is written.
    """
    drop_caches()
    web.bytes_sent = 0
    started = time.perf_counter()
    image = client.images.pull(f"lazy+{web.url}")
    first_command(client, image.digest, argv)
    whole = time.perf_counter() - started
    sent = web.bytes_sent
    if keep_s:
        time.sleep(keep_s)
        lazy.publish_traces(store, store.find(image.digest), web.root)
    client.images.delete(image.digest)
    return whole, sent, image.on_demand_bytes


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=1024)
    parser.add_argument("--mb-per-s", type=float, default=100)
    parser.add_argument("--latency-ms", type=float, default=10)
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--json")
    options = parser.parse_args()
    series: dict[str, list[float]] = {"full": [], "on demand": [], "with trace": []}
    sent: dict[str, int] = {}
    with (
        tempfile.TemporaryDirectory(prefix="opendsec-bench-store-", dir="/var/tmp") as folder,
        lazy_store(Path(folder)) as web,
        bench_server(lazy_sources=[web.url]) as server,
        Client(base_url=server.url, api_key=server.api_key) as client,
    ):
        store = ImageStore(server.config.state_path / "images")
        base = store.find("base")
        size = sum(store.layer_bytes(layer) for layer in base.layers) >> 20
        with store.holding() as hold:
            layer = big_layer(store, options.mb - size)
            hold.add([layer])
            image = store.put([*base.layers, layer], ImageConfig(user="root"))
        lazy.publish(store, image, web.root)
        files = ((options.mb - size) << 20) // _FILE_BYTES
        argv = command(files)
        web.bytes_per_s = options.mb_per_s * 1e6
        web.latency_s = options.latency_ms / 1e3
        client.images.delete(image.digest)
        for at in range(options.count):
            series["full"].append(full(client, store, web, image, argv))
            keep_s = _TRACE_S if at == options.count - 1 else 0
            took, sent["on demand"], length = on_demand(client, store, web, argv, keep_s)
            series["on demand"].append(took)
        for _ in range(options.count):
            took, sent["with trace"], length = on_demand(client, store, web, argv)
            series["with trace"].append(took)
    results: list[Result] = [summarise(name, 1, times) for name, times in series.items()]
    print(f"image: {length >> 20} MiB; store: {options.mb_per_s:g} MB/s, {options.latency_ms:g} ms")
    print_results(results)
    p50 = {result.name: result.p50_ms for result in results}
    for name in ("on demand", "with trace"):
        print_ratio(f"first command: {name} / full", p50[name], p50["full"], "at most 0.2x")
        print_ratio(f"bytes: {name} / image", sent[name], length, "at most 0.1x")
    write_json(options.json, results, bytes_sent=sent, image_bytes=length)


if __name__ == "__main__":
    main()
