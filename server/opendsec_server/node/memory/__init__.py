# SPDX-License-Identifier: AGPL-3.0-only
"""Where memory of paused sandboxes goes."""
