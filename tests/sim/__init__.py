# SPDX-License-Identifier: AGPL-3.0-only
"""Simulated nodes: they speak the real node protocol over HTTP, and fail on demand."""
