# SPDX-License-Identifier: AGPL-3.0-only
"""The program ``opendsecd``: command line and composition of all parts in one process."""
