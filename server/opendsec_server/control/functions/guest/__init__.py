# SPDX-License-Identifier: AGPL-3.0-only
"""The two programs of a worker, which run inside of a sandbox with its own ``python3``.

They are sent as text and never imported there: standard library only, Python 3.8 or later.
``front`` runs as root: it speaks with the server, keeps limits and cleans up. ``zygote`` holds the
modules that were imported in advance, and forks a process for each call. No byte of a call ever
reaches the zygote's memory, so that a call cannot find what an earlier one was about.
"""
