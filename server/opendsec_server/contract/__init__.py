# SPDX-License-Identifier: AGPL-3.0-only
"""What the control plane and the node agree on.

``control`` and ``node`` never import each other. Both import this package:
typed structs, the state table, the error tree and the ``NodeClient`` interface.
"""
