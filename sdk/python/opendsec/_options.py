# SPDX-License-Identifier: Apache-2.0
"""What a sandbox is created with, as data: for many creates in one call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from ._errors import InvalidRequest
from ._models import NetworkPolicy, OnTimeout, ReadyCheck, StateMode, VmOptions


class SandboxOptions(TypedDict, total=False):
    """The arguments of ``Client.create``, under the same names."""

    template: str
    cpu: float | None
    memory_mb: int | None
    disk_mb: int | None
    env: Mapping[str, str] | None
    metadata: Mapping[str, str] | None
    labels: Sequence[str]
    task_id: str | None
    timeout_s: float
    idle_timeout_s: float | None
    on_timeout: OnTimeout
    pause_mode: StateMode | None
    auto_resume: bool
    network: NetworkPolicy | None
    backend: str | None
    vm: VmOptions | None
    image: str | None
    layers: Sequence[str]
    start_image: bool
    ready: ReadyCheck | None
    node_labels: Mapping[str, str] | None


_KNOWN = SandboxOptions.__annotations__.keys()
_WHOLE_SECONDS = ("timeout_s", "idle_timeout_s")


def body_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as the API takes them. What is None is left out: it stays as it is otherwise.

    Raises:
        InvalidRequest: there is no option of such a name.
    """
    body: dict[str, Any] = {}
    for name, value in options.items():
        if name not in _KNOWN:
            raise InvalidRequest(f"There is no option {name!r} of a sandbox.")
        if value is None:
            continue
        if name in _WHOLE_SECONDS:
            value = math.ceil(value)
        elif isinstance(value, Mapping):
            value = dict(value)
        elif name in ("labels", "layers"):
            value = list(value)
        body[name] = value
    return body
