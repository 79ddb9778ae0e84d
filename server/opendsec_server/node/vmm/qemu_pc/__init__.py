# SPDX-License-Identifier: AGPL-3.0-only
"""The QEMU driver for full virtual machines: q35, firmware, screen, passed-through devices."""

from .config import PcConfig
from .driver import CONSOLE_SOCKET, SCREEN_SOCKET, QemuPcVmm

__all__ = ["CONSOLE_SOCKET", "SCREEN_SOCKET", "PcConfig", "QemuPcVmm"]
