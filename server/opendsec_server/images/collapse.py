# SPDX-License-Identifier: AGPL-3.0-only
"""Images of more layers than an overlay takes: the lowest become one.

The lowest run is what can be merged without losing anything: its whiteouts have nothing below them
that they could hide. It is mounted as an overlay in a mount namespace of the program that makes
the EROFS file of it, so nothing stays mounted however that ends.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path

from opendsec_server.contract.images import LAYERS_MAX

from . import convert, limits
from .store import Hold, ImageStore

_VERSION = 1
"""Raise it when the same layers become another file."""

_MOUNT_MERGED = r"""set -e
at=$1; shift
mount -t tmpfs -o mode=0700,size=16m none "$at"
cd "$at"
mkdir merged
lower=
n=0
while [ "$1" != -- ]; do
  mkdir "$n"
  mount -t erofs -o ro "$1" "$n"
  lower="$lower${lower:+:}$n"
  n=$((n + 1))
  shift
done
shift
if [ "$n" = 1 ]; then
  mount --bind 0 merged
else
  mount -t overlay -o "ro,lowerdir=$lower" none merged
fi
exec "$@"
"""


async def collapse(
    store: ImageStore, layers: Sequence[str], hold: Hold, most: int = LAYERS_MAX
) -> list[str]:
    """At most ``most`` layers that show the same; what was collapsed once is found again.

    Args:
        store: Has the layers, and gets the new one.
        layers: Digests (hex), the lowest first.
        hold: Keeps the new one.
        most: How many there may be.

    Raises:
        NodeFull: no room.
    """
    have = list(await asyncio.to_thread(store.visible, layers))
    if len(have) <= most:
        return have
    count = len(have) - most + 1
    # In steps, so that an image that grows finds what was collapsed before.
    count = min(-(-count // limits.COLLAPSE_STEP) * limits.COLLAPSE_STEP, len(have))
    lowest, rest = have[:count], have[count:]
    key = hashlib.sha256(f"collapsed {_VERSION} {' '.join(lowest)}".encode()).hexdigest()
    made = await asyncio.to_thread(hold.claim, key)
    if made is None:
        with store.scratch("collapse") as scratch:
            target = scratch / "layer"
            await run_merged(
                [store.layer_path(layer) for layer in lowest],
                scratch,
                ["mkfs.erofs", *convert.EROFS_OPTIONS, str(target), "merged"],
            )
            convert.fix_build_time(target)
            made = await asyncio.to_thread(store.adopt, target, hold=hold, key=key, diff=False)
    return [made, *rest]


async def run_merged(
    layers: Sequence[Path],
    scratch: Path,
    argv: Sequence[str],
    timeout_s: float = limits.PULL_TIMEOUT_S,
) -> None:
    """Run a program in a directory whose ``merged`` is what layers show together, read-only.

    Args:
        layers: Their files, the lowest first.
        scratch: An own directory.
        argv: The program.
        timeout_s: After it, it is killed.

    Raises:
        As ``convert.run_program``.
    """
    at = scratch / "view"
    at.mkdir(mode=0o700)
    await convert.run_program(
        [
            "unshare", "--mount", "--propagation", "private", "sh", "-c", _MOUNT_MERGED, "merge",
            str(at), *(str(layer) for layer in reversed(layers)), "--", *argv,
        ],
        timeout_s,
    )  # fmt: skip
