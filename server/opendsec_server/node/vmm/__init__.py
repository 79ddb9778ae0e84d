# SPDX-License-Identifier: AGPL-3.0-only
"""Programs that run virtual machines (VMMs), behind one interface: see ``base``."""
