# SPDX-License-Identifier: AGPL-3.0-only
"""Structured logs: one line per event, with the request's and sandbox's ids from context."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from .config import Config


def configure_logging(config: Config) -> None:
    """Send all logs to standard error, as JSON lines or, on a terminal, in colour."""
    console = config.log_format == "console" or (
        config.log_format == "auto" and sys.stderr.isatty()
    )
    # Plain tracebacks: the rich ones print local variables, tokens among them.
    renderer: Any = (
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if console
        else structlog.processors.JSONRenderer()
    )
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if not console:
        shared.append(structlog.processors.format_exc_info)
    level = getattr(logging, config.log_level.upper())
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    # Libraries log through the standard module; their lines get the same shape.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[renderer])
    )
    logging.basicConfig(handlers=[handler], level=max(level, logging.WARNING), force=True)
