# SPDX-License-Identifier: Apache-2.0
"""When to repeat a call, and after which pause. Pure decisions; no I/O."""

from __future__ import annotations

import enum
import random
import time
from collections.abc import Callable

from . import _limits
from ._errors import CapacityError, ConnectionFailed, OpendsecError

RETRYABLE_STATUS = frozenset({429, 502, 503, 504})


class Repeat(enum.Enum):
    """How safe it is to send a request twice."""

    IF_UNSENT = "only if the server cannot have seen it"
    IDEMPOTENT = "always: a second one changes nothing"


class Unsent(ConnectionFailed):
    """The connection was never made, so the server has not seen the request."""


class RetryPolicy:
    """Bounded, jittered, exponential back-off that honours ``Retry-After``.

    Args:
        retries_max: Repetitions after the first try. 0 turns retrying off.
        uniform: Source of jitter, for tests.
    """

    def __init__(
        self,
        retries_max: int = _limits.RETRIES_MAX_DEFAULT,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self.retries_max = retries_max
        self._uniform = uniform

    def pause_s(self, error: OpendsecError, tries: int, repeat: Repeat) -> float | None:
        """Seconds to wait before the next try; None: give up and raise ``error``.

        Args:
            tries: How many tries were made so far, at least 1.
        """
        if tries > self.retries_max or not _worth_repeating(error, repeat):
            return None
        ceiling_s = min(_limits.RETRY_MAX_S, _limits.RETRY_BASE_S * 2 ** (tries - 1))
        pause_s = self._uniform(ceiling_s / 2, ceiling_s)
        if error.retry_after_s is not None:
            asked_s = min(max(error.retry_after_s, 0.0), _limits.RETRY_AFTER_MAX_S)
            # Spread the herd: never earlier than asked, a little later each.
            pause_s = asked_s + self._uniform(0.0, ceiling_s)
        return pause_s


class Patience:
    """How long one long answer, which can be gone on with, is asked for again after it broke: until
    the server was away for ``RECONNECT_S`` in one piece.

    Args:
        policy: Of the client. Without retries the first failure is the last.
        clock: Monotonic seconds, for tests.
    """

    def __init__(self, policy: RetryPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._clock = clock
        self._asked_at = clock()
        self._away_since: float | None = None

    def asking(self) -> None:
        """The answer is asked for now."""
        self._asked_at = self._clock()

    def heard(self) -> None:
        """The server is there: something came."""
        self._away_since = None

    def spent(self, error: OpendsecError) -> bool:
        """Whether a failure is the last one: raise it then, else ask again after a pause."""
        now = self._clock()
        if self._away_since is None or now - self._asked_at > _limits.STREAM_LASTED_S:
            self._away_since = now
        if not error.retryable or self._policy.retries_max == 0:
            return True
        return now - self._away_since > _limits.RECONNECT_S


def _worth_repeating(error: OpendsecError, repeat: Repeat) -> bool:
    if isinstance(error, Unsent) or error.details.get("not_forwarded"):
        return True
    if repeat is Repeat.IF_UNSENT:
        return False
    if isinstance(error, ConnectionFailed):
        return True
    if isinstance(error, CapacityError) and error.http_status == 429:
        return True
    return error.retryable or (error.http_status in RETRYABLE_STATUS and error.fault != "user")
