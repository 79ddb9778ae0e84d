# SPDX-License-Identifier: AGPL-3.0-only
"""Inside the lab: what nodes would make at their first sandbox, in the cache beforehand.

Under emulation that takes longer than a create may: the base image, for which the one that was
brought along is taken, and the guest kernel of microVMs, which is made here.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from opendsec_server.binaries import find_agent
from opendsec_server.config import Config, ConfigError
from opendsec_server.images import base
from opendsec_server.images.guest import ensure_guest
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
    ImageStore(folder).put(found.layers, found.config, recipe=recipe)
    os.environ["OPENDSEC_IMAGE_CACHE"] = str(folder)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            asyncio.run(ensure_guest(Config(), Path(scratch), find_agent(Config()), print))
        except ConfigError as exc:
            print(f"lab: no guest kernel for microVMs: {exc}", flush=True)


if __name__ == "__main__":
    main()
