# SPDX-License-Identifier: AGPL-3.0-only
"""The unpacker of layers against GNU tar, in turns.

    sudo .venv/bin/python -m bench.layers [--count 5] [--tree /usr]

- unpack: the files of a tree as a layer of about 200 MB (gzip, and zstd), against ``tar``. Ours
  computes two digests on the way, which ``tar`` does not.
- many files: 100,000 small ones in one directory, not compressed.
- copy: the changes of a sandbox to where a layer is made of them, against ``cp -a``.

No server is started. Files go to /var/tmp.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.stats import Result, print_ratio, print_results, summarise, write_json
from opendsec_server.binaries import find_layer

_LAYER_BYTES = 200_000_000
"""Of the compressed layer, about: files are taken until their compressed size is near it."""
_COMPRESSED_SHARE = 0.4
_SMALL_FILES = 100_000


def some_of(tree: Path, into: Path) -> None:
    """Names of files of a tree, one a line, that are about a layer's worth."""
    room = _LAYER_BYTES / _COMPRESSED_SHARE
    with into.open("w") as out:
        for path in sorted(tree.rglob("*")):
            if path.is_symlink() or not path.is_file() or "\n" in str(path):
                continue
            room -= path.stat().st_size
            if room < 0:
                return
            out.write(f"{path.relative_to(tree)}\n")


def small_files(target: Path) -> None:
    """A tar of many small files in one directory."""
    with tarfile.open(target, "w") as tar:
        for number in range(_SMALL_FILES):
            entry = tarfile.TarInfo(f"many/{number:06}")
            entry.size = 100
            tar.addfile(entry, io.BytesIO(b"x" * 100))


def timed(scratch: Path, argv: Callable[[Path], list[str]]) -> float:
    """Seconds that a command takes to fill a new directory."""
    target = scratch / "target"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    started = time.perf_counter()
    subprocess.run(argv(target), check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def by_us(layer: str, blob: Path) -> Callable[[Path], list[str]]:
    """Our command for an archive."""
    return lambda into: [layer, "unpack", "--into", str(into), "--blob", str(blob)]


def by_tar(blob: Path) -> Callable[[Path], list[str]]:
    """GNU tar's command for an archive."""
    return lambda into: ["tar", "-xf", str(blob), "-C", str(into)]


def compare(
    name: str,
    count: int,
    scratch: Path,
    ours: Callable[[Path], list[str]],
    theirs: Callable[[Path], list[str]],
) -> tuple[Result, Result]:
    """Both in turns, after one of each that does not count."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(count + 1):
        for series, argv in zip(times, (ours, theirs), strict=True):
            took = timed(scratch, argv)
            if turn:
                series.append(took)
    return summarise(f"{name}: ours", 1, times[0]), summarise(f"{name}: theirs", 1, times[1])


def main() -> None:
    """Make the archives, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5, help="runs of each")
    parser.add_argument("--tree", type=Path, default=Path("/usr"), help="where files come from")
    parser.add_argument("--json")
    options = parser.parse_args()
    layer = str(find_layer())
    with tempfile.TemporaryDirectory(prefix="opendsec-bench-layers-", dir="/var/tmp") as folder:
        scratch = Path(folder)
        names, plain = scratch / "names", scratch / "plain.tar"
        some_of(options.tree, names)
        argv = ["tar", "-C", str(options.tree), "-T", str(names), "-cf", str(plain)]
        subprocess.run(argv, check=True)
        subprocess.run(["gzip", "-k", str(plain)], check=True)
        subprocess.run(["zstd", "-q", str(plain)], check=True)
        many, upper = scratch / "many.tar", scratch / "upper"
        small_files(many)
        upper.mkdir()
        subprocess.run(["tar", "-xf", str(plain), "-C", str(upper)], check=True)
        archives = {
            "unpack gzip": scratch / "plain.tar.gz",
            "unpack zstd": scratch / "plain.tar.zst",
            f"{_SMALL_FILES} files": many,
        }
        pairs = [
            compare(name, options.count, scratch, by_us(layer, blob), by_tar(blob))
            for name, blob in archives.items()
        ]
        pairs.append(
            compare(
                "copy",
                options.count,
                scratch,
                lambda into: [layer, "copy-upper", "--from", str(upper), "--into", str(into)],
                lambda into: ["cp", "-a", f"{upper}/.", str(into)],
            )
        )
        sizes = {name: blob.stat().st_size for name, blob in archives.items()}
    print_results([result for pair in pairs for result in pair])
    for ours, theirs in pairs:
        print_ratio(ours.name.removesuffix(": ours"), ours.p50_ms, theirs.p50_ms, "below 1")
    write_json(options.json, [result for pair in pairs for result in pair], bytes=sizes)


if __name__ == "__main__":
    main()
