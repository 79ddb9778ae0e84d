# SPDX-License-Identifier: Apache-2.0
"""When to repeat a call, and after which pause. Pure decisions; no I/O."""

from __future__ import annotations

import enum
import random
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
