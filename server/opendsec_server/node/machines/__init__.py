# SPDX-License-Identifier: AGPL-3.0-only
"""What virtual machines of every VMM have in common: guest image, templates' memory, identity."""
