# SPDX-License-Identifier: AGPL-3.0-only
"""What every backend promises, tested through public doors only. See README.md."""
