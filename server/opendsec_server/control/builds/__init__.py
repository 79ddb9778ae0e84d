# SPDX-License-Identifier: AGPL-3.0-only
"""Builds of templates: each step runs in a sandbox of its own, and leaves an image."""
