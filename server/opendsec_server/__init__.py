# SPDX-License-Identifier: AGPL-3.0-only
"""OpenDsec server: gateway, control plane and node agent of the sandbox platform."""

__version__ = "0.1.0"
