# SPDX-License-Identifier: AGPL-3.0-only
"""What must differ between machines that began as the same memory."""

from __future__ import annotations

import base64
import hashlib
import os
import uuid

from opendsec_server.node.agent_client import Fresh
from opendsec_server.node.sandbox import Sandbox

ENTROPY_BYTES = 64


def fresh_identity(box: Sandbox, *, resumed: bool) -> Fresh:
    """For the agent of a machine that is about to run.

    Entropy is new every time, a resume included: the saved state of the kernel's generator may be
    used by others. The machine id follows from the sandbox's id. The boot id is new where the
    memory was another's; a kernel that boots makes its own, and a resume is no boot.

    Args:
        box: The sandbox.
        resumed: It continues its own memory.
    """
    entropy = base64.b64encode(os.urandom(ENTROPY_BYTES)).decode()
    if resumed:
        return Fresh(restored=box.restore_from is not None, entropy=entropy)
    machine_id = hashlib.sha256(f"machine {box.sandbox_id}".encode()).hexdigest()[:32]
    if box.restore_from is None:
        return Fresh(entropy=entropy, machine_id=machine_id)
    return Fresh(restored=True, entropy=entropy, machine_id=machine_id, boot_id=str(uuid.uuid4()))
