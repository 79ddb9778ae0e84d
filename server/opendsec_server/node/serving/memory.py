# SPDX-License-Identifier: AGPL-3.0-only
"""Which requests a node has heard, so that none is heard twice."""

from __future__ import annotations

import time
from collections.abc import Callable

from opendsec_server.contract import node_wire as wire
from opendsec_server.contract.errors import NodeClocksDiffer, NodeUnavailable

REMEMBERED_MAX = 500_000
"""Some 4,000 requests a second for as long as they are remembered; some 60 MB."""


class Memory:
    """Remembers nonces for as long as the time of their request would be good.

    What was said to an earlier life of the node is known by its time.

    Args:
        clock: Seconds since the epoch.
        monotonic: Seconds that only grow.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._began_us = int(clock() * 1_000_000)
        self._young: set[str] = set()
        self._old: set[str] = set()
        self._turn_at = monotonic() + self._kept_s()

    @staticmethod
    def _kept_s() -> float:
        return 2 * wire.CLOCK_SKEW_S_MAX

    def note(self, nonce: str, made_at_us: int) -> bool:
        """Remember a request. False: it was heard, or may have been heard by an earlier life.

        Raises:
            NodeClocksDiffer: its time is too far from ours.
            NodeUnavailable: as many are remembered as may be.
        """
        now = self._clock()
        ahead_s = made_at_us / 1_000_000 - now
        if abs(ahead_s) > wire.CLOCK_SKEW_S_MAX:
            raise NodeClocksDiffer(
                f"the gateway's clock is {abs(ahead_s):.0f} s "
                f"{'ahead of' if ahead_s > 0 else 'behind'} the node's, or its request took as "
                f"long; {wire.CLOCK_SKEW_S_MAX:.0f} s are allowed",
                details={"ahead_s": round(ahead_s, 3), "allowed_s": wire.CLOCK_SKEW_S_MAX},
            )
        self._turn()
        if nonce in self._young or nonce in self._old or made_at_us <= self._began_us:
            return False
        if len(self._young) + len(self._old) >= REMEMBERED_MAX:
            raise NodeUnavailable("the node gets too many requests", retry_after_s=1)
        self._young.add(nonce)
        return True

    def _turn(self) -> None:
        """Forget those of the turn before the last."""
        now = self._monotonic()
        if now < self._turn_at:
            return
        idle = now - self._turn_at > self._kept_s()
        self._old = set() if idle else self._young
        self._young = set()
        self._turn_at = now + self._kept_s()
