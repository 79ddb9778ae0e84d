# SPDX-License-Identifier: AGPL-3.0-only
"""Makes the template ``base`` while the server is already up, and tells readiness about it."""

from __future__ import annotations

import asyncio

import structlog

from opendsec_server.config import Config, ConfigError
from opendsec_server.contract.errors import NodeUnavailable
from opendsec_server.images.base import ensure_base

log = structlog.get_logger(__name__)

FAILED = "could not be built"


class BaseTemplate:
    """The build of ``base``, running in a thread, and its last line of progress."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._line = "waiting to be built"
        self._failed = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin. Returns at once; a template that is there already is found in milliseconds."""
        self._task = asyncio.create_task(self._build(), name="base-template")

    async def check(self) -> None:
        """Readiness.

        Raises:
            NodeUnavailable: the template is being built, or could not be.
        """
        if self._task is None or not self._task.done() or self._failed:
            raise NodeUnavailable(self._line)

    async def _build(self) -> None:
        try:
            image = await asyncio.to_thread(ensure_base, self._config, self._progress)
        except ConfigError as exc:
            self._failed = True
            self._line = f"{FAILED}: {exc}"
            log.error("base_template_failed", error=str(exc))
        else:
            log.info("base_template_ready", digest=image.digest[:19])

    def _progress(self, line: str) -> None:
        self._line = line
        log.info("base_template", progress=line)
