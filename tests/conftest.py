# SPDX-License-Identifier: AGPL-3.0-only
"""Shared by all tests outside the packages: a real server on this machine, checked for leaks."""
