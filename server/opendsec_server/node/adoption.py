# SPDX-License-Identifier: AGPL-3.0-only
"""Taking back the process of a sandbox that ran on while the daemon was away."""

from __future__ import annotations

import os

from . import process
from .network.slots import Slot
from .sandbox import Sandbox
from .services import Services


def take_back(services: Services, box: Sandbox) -> bool:
    """Open what the daemon holds of a running sandbox: its process and its network.

    Returns:
        Whether exactly the journalled process lives in the sandbox's own control group.
    """
    identity, number = box.identity, box.record.slot
    if identity is None or number is None:
        return False
    pidfd = process.open_identity(identity, services.boot_id)
    if pidfd is None:
        return False
    try:
        if not services.cgroups.contains(box.sandbox_id, identity.pid):
            raise ProcessLookupError
        netns_fd = os.open(f"/proc/{identity.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        os.close(pidfd)
        return False
    box.pidfd = pidfd
    box.slot = Slot(number, services.slots.address_of(number), netns_fd, None)
    return True
