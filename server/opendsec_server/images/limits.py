# SPDX-License-Identifier: AGPL-3.0-only
"""Limits of the image store, in one place."""

from __future__ import annotations

IMAGE_LAYERS_MAX = 512
"""Layers of one image that is taken in; above ``LAYERS_MAX`` the lowest are collapsed."""

MANIFEST_BYTES_MAX = 4 * 1024 * 1024
"""A manifest, an index of manifests, or a configuration (the specification asks for 4 MiB)."""

LAYER_ENTRIES_MAX = 4_000_000
"""Files in one layer."""

LAYERS_AT_ONCE = 3
"""Layers of all pulls that are fetched and converted at one time."""

ATTEMPTS_MAX = 3
"""How often what a registry or the network broke off is tried."""

RETRY_PAUSE_S = 0.5
"""Before the second attempt; doubled for each further one."""

MANIFEST_TIMEOUT_S = 30.0
"""For the manifest and the configuration of an image."""

STALL_TIMEOUT_S = 60.0
"""A layer of which nothing has come for this long: the registry is too slow."""

PULL_TIMEOUT_S = 3_600.0
"""A whole pull, push or conversion."""

PROBE_AFTER_S = 3.0
"""When skopeo has not answered for this long, the registry is asked why."""

PROBE_TIMEOUT_S = 10.0
"""One answer of a registry to a question of ours, from piece to piece."""

PROBE_TOTAL_S = 30.0
"""All that one question takes, with its token."""

ORPHAN_LAYER_KEPT_S = 300.0
"""When room is made, layers of failed pulls go if they have waited this long for a repetition."""

ORPHAN_LAYER_SWEPT_S = 3_600.0
"""The same at the daemon's start."""

DISK_FREE_FLOOR_BYTES = 512 * 1024 * 1024
"""Below this on the store's file system, nothing is pulled or built."""

NAME_CHARS_MAX = 255
"""A reference or name."""

COLLAPSE_STEP = 16
"""Layers are collapsed in multiples of this, so that images that grow from one stem share what
was collapsed."""
