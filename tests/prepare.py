# SPDX-License-Identifier: AGPL-3.0-only
"""Makes, ahead of the tests, what the first of them would wait for: the template ``base`` and the
guest of microVMs. Both are kept in the cache that all test servers use."""

from __future__ import annotations

import asyncio
import os
import tempfile

from opendsec_server.binaries import find_agent
from opendsec_server.config import Config, ConfigError
from opendsec_server.images.base import ensure_base
from opendsec_server.images.guest import ensure_guest

from .harness import IMAGE_CACHE


def main() -> None:
    """What cannot be made is told; the tests that need it say what that means for them."""
    IMAGE_CACHE.mkdir(parents=True, exist_ok=True)
    os.environ["OPENDSEC_IMAGE_CACHE"] = str(IMAGE_CACHE)
    with tempfile.TemporaryDirectory(prefix="opendsec-prepare-", dir="/var/tmp") as state:
        config = Config(state_dir=state)
        try:
            ensure_base(config, _tell)
            images = config.state_path / "images"
            asyncio.run(ensure_guest(config, images, find_agent(config), _tell))
        except ConfigError as exc:
            _tell(f"not made: {exc}")


def _tell(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
