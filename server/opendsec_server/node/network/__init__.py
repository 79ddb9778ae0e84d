# SPDX-License-Identifier: AGPL-3.0-only
"""Network slots: one namespace, one point-to-point link and one firewall per sandbox."""
