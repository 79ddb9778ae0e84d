# SPDX-License-Identifier: AGPL-3.0-only
"""Why a sandbox did not start, in one word that its record and the sums of its task keep."""

from __future__ import annotations

from opendsec_server.contract.errors import (
    ImageDamaged,
    ImageNotFound,
    NodeFull,
    NodeUnavailable,
    OpendsecError,
    RegistryDenied,
    RegistryLimited,
    RegistryUnavailable,
    StartTimeout,
    StateConflict,
)
from opendsec_server.contract.states import EndReason

_REASONS: tuple[tuple[type[OpendsecError], EndReason], ...] = (
    (StateConflict, EndReason.KILLED),
    (StartTimeout, EndReason.START_TIMEOUT),
    (NodeFull, EndReason.NO_ROOM),
    (NodeUnavailable, EndReason.NODE_UNAVAILABLE),
    (ImageNotFound, EndReason.IMAGE_PULL),
    (ImageDamaged, EndReason.IMAGE_PULL),
    (RegistryDenied, EndReason.IMAGE_PULL),
    (RegistryLimited, EndReason.IMAGE_PULL),
    (RegistryUnavailable, EndReason.IMAGE_PULL),
)


def reason_of(error: OpendsecError) -> EndReason:
    """What the record of a sandbox is to say that did not start because of this."""
    if error.details.get("oom_kills"):
        return EndReason.OOM
    return next(
        (reason for kind, reason in _REASONS if isinstance(error, kind)), EndReason.START_FAILED
    )
