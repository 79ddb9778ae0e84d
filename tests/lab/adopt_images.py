# SPDX-License-Identifier: AGPL-3.0-only
"""Inside the lab: take the base image that was brought along for one that was made here.

The lab would make its own, of its own release, which takes a quarter of an hour under emulation
and is not what tests in the lab are about.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from opendsec_server.config import Config
from opendsec_server.images import base
from opendsec_server.images.store import ImageNotFound, ImageStore


def main() -> None:
    """``adopt_images FOLDER``."""
    folder = Path(sys.argv[1])
    recipe = base._recipe(base.host_distribution(), Config())
    try:
        found = ImageStore(folder).find(base.BASE)
    except ImageNotFound:
        print("lab: no base image was brought along; it will be made here", flush=True)
        return
    path = folder / found.digest / "manifest.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(found, recipe=recipe)))


if __name__ == "__main__":
    main()
