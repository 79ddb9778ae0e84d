# SPDX-License-Identifier: AGPL-3.0-only
"""Which backends the node offers, and which one a create gets."""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from opendsec_server.config import Config
from opendsec_server.contract.errors import NotSupported
from opendsec_server.contract.node import Backend, BackendInfo, StateMode

from .nodes import Fleet, NodeNotReached

log = structlog.get_logger(__name__)


class Backends:
    """Questions about backends, answered from what the nodes declare of them."""

    def __init__(self, config: Config, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        if self.default not in self._by_name and not self._unreached:
            log.warning(
                "the default backend is not available: creates must name another",
                default=self.default,
                available=list(self._by_name),
            )

    @property
    def _unreached(self) -> bool:
        return any(member.info is None for member in self._fleet.members)

    @property
    def _by_name(self) -> Mapping[str, BackendInfo]:
        return self._fleet.backends

    @property
    def default(self) -> Backend:
        """What a create gets that names no backend."""
        if self._config.default_backend != "auto":
            return self._config.default_backend
        microvm = self._by_name.get("microvm")
        # Emulated guests are complete but slow: only those who ask for one get one.
        return "microvm" if microvm is not None and microvm.accelerator == "kvm" else "container"

    def known(self, name: str) -> BackendInfo:
        """What the node says of a backend.

        Raises:
            NotSupported: no node offers it.
            NodeNotReached: none of those that were reached since the start does; others may.
        """
        info = self._by_name.get(name)
        if info is None and self._unreached:
            raise NodeNotReached(
                f"no node that offers backend `{name}` was reached yet",
                remediation="Retry after a moment.",
                retry_after_s=2,
            )
        if info is None:
            raise NotSupported(
                f"backend `{name}` is not available on this server",
                remediation="GET /v1/info lists what is.",
                details={"available": list(self._by_name)},
            )
        return info

    def keeps_memory(self, name: str) -> bool:
        """Whether snapshots and forks of this backend can hold memory."""
        info = self._by_name.get(name)
        return info is not None and info.capabilities.memory_snapshot

    def check_saving(self, name: str, mode: StateMode) -> None:
        """Whether sandboxes of a backend can be snapshotted and forked in this mode.

        Raises:
            NotSupported: not at all, or not with their memory.
        """
        capabilities = self.known(name).capabilities
        if not capabilities.fork:
            raise NotSupported(f"sandboxes of backend `{name}` cannot be forked or snapshotted")
        if mode == "full" and not capabilities.memory_snapshot:
            raise NotSupported(
                f"backend `{name}` cannot save the memory of a running sandbox",
                remediation="Ask for mode `filesystem`: it keeps the disk.",
                details={"backend": name, "mode": mode, "supported": ["filesystem"]},
            )
