# SPDX-License-Identifier: AGPL-3.0-only
"""Figures for Prometheus. Names and labels are part of the product: change them with care."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from opendsec_server.contract.errors import OpendsecError

_LATENCY_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0
)  # fmt: skip


class ControlMetrics:
    """One registry per server, so that several can live in one process (tests)."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        self.request_s = Histogram(
            "opendsec_http_request_duration_seconds",
            "Time from request to the end of the answer.",
            ("method", "route", "status"),
            buckets=_LATENCY_BUCKETS_S,
            registry=self._registry,
        )
        self.create_s = Histogram(
            "opendsec_sandbox_create_duration_seconds",
            "Time from the create request to its outcome.",
            ("backend", "outcome"),
            buckets=_LATENCY_BUCKETS_S,
            registry=self._registry,
        )
        self.state_s = Histogram(
            "opendsec_sandbox_operation_duration_seconds",
            "Time of a pause, resume, snapshot or fork, by outcome.",
            ("operation", "backend", "outcome"),
            buckets=_LATENCY_BUCKETS_S,
            registry=self._registry,
        )
        self.errors = Counter(
            "opendsec_errors",
            "Errors answered, by code and whose fault they are.",
            ("code", "fault"),
            registry=self._registry,
        )
        self.ended = Counter(
            "opendsec_sandboxes_ended",
            "Sandboxes that ended, by reason.",
            ("reason",),
            registry=self._registry,
        )
        self._sandboxes = Gauge(
            "opendsec_sandboxes",
            "Live sandboxes by state and backend.",
            ("state", "backend"),
            registry=self._registry,
        )
        self._nodes = Gauge(
            "opendsec_nodes", "Nodes by health.", ("health",), registry=self._registry
        )
        self._batch_items = Gauge(
            "opendsec_batch_items",
            "Items of the batches that this process works on, by whether they have begun.",
            ("state",),
            registry=self._registry,
        )
        self.store_up = Gauge(
            "opendsec_store_up", "1 if the database answers, else 0.", registry=self._registry
        )

    @contextlib.contextmanager
    def timed(self, operation: str, backend: str) -> Iterator[None]:
        """Measure an operation on a sandbox; an error's code is its outcome."""
        started, outcome = time.perf_counter(), "unknown"
        try:
            yield
            outcome = "ok"
        except OpendsecError as exc:
            outcome = exc.code
            raise
        finally:
            took_s = time.perf_counter() - started
            self.state_s.labels(operation, backend, outcome).observe(took_s)

    def set_sandboxes(self, counts: dict[tuple[str, str], int]) -> None:
        """Replace the live counts, keyed by state and backend."""
        self._sandboxes.clear()
        for (state, backend), count in counts.items():
            self._sandboxes.labels(state, backend).set(count)

    def set_nodes(self, counts: Mapping[str, int]) -> None:
        """Replace the counts of nodes, keyed by health."""
        self._nodes.clear()
        for health, count in counts.items():
            self._nodes.labels(health).set(count)

    def set_batch_items(self, *, waiting: int, starting: int) -> None:
        """Replace the counts of items without an outcome."""
        self._batch_items.labels("waiting").set(waiting)
        self._batch_items.labels("starting").set(starting)

    def render(self) -> bytes:
        """All figures in Prometheus' text format."""
        return generate_latest(self._registry)
