# SPDX-License-Identifier: AGPL-3.0-only
"""Groups: several sandboxes on one private network, started and ended as one."""

from .model import GroupSpec, HealthCheck, ServiceSpec
from .service import Groups, GroupView, Logs, MemberView

__all__ = [
    "GroupSpec",
    "GroupView",
    "Groups",
    "HealthCheck",
    "Logs",
    "MemberView",
    "ServiceSpec",
]
