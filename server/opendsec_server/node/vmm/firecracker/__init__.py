# SPDX-License-Identifier: AGPL-3.0-only
"""MicroVMs on Firecracker under its jailer. ``driver.FirecrackerVmm`` is the way in."""

from .driver import FirecrackerVmm

__all__ = ["FirecrackerVmm"]
