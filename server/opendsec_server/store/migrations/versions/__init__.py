# SPDX-License-Identifier: AGPL-3.0-only
"""Schema changes, in order. A released script is never edited."""
