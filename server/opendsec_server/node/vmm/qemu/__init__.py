# SPDX-License-Identifier: AGPL-3.0-only
"""QEMU's ``microvm`` machine, on KVM or emulated."""

from .driver import QemuVmm

__all__ = ["QemuVmm"]
