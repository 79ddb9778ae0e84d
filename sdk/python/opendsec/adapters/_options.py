# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="import-not-found"
"""What the configurations of the adapters have in common. Needs pydantic, as each of them does."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from opendsec._models import NetworkPolicy

LIFE_S = 6 * 3600.0
"""How long a sandbox lives if the framework never ends it, because it was killed itself."""


class SandboxOptions(BaseModel, frozen=True):
    """How to make a sandbox; see ``AsyncClient.create`` for what each one means.

    There is no key in it: frameworks write their configuration into logs.
    """

    model_config = ConfigDict(extra="forbid")

    template: str = "base"
    image: str | None = None
    layers: list[str] = []
    backend: str | None = None
    cpu: float | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    env: dict[str, str] = {}
    internet: bool = True
    allow: list[str] = []
    deny: list[str] = []
    labels: list[str] = []
    metadata: dict[str, str] = {}
    task_id: str | None = None
    timeout_s: float = LIFE_S

    def __hash__(self) -> int:
        # Frameworks use configurations as keys; lists and mappings have no hash of their own.
        return hash(self.model_dump_json())

    def create_arguments(self, *labels: str) -> dict[str, Any]:
        """Arguments of ``AsyncClient.create``.

        Args:
            labels: Set beside those of the configuration.
        """
        return {
            "template": self.template,
            "image": self.image,
            "layers": self.layers,
            "backend": self.backend,
            "cpu": self.cpu,
            "memory_mb": self.memory_mb,
            "disk_mb": self.disk_mb,
            "env": self.env,
            "network": NetworkPolicy(
                internet=self.internet, allow=tuple(self.allow), deny=tuple(self.deny)
            ),
            "labels": [*self.labels, *labels],
            "metadata": self.metadata,
            "task_id": self.task_id,
            "timeout_s": self.timeout_s,
        }
