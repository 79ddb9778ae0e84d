# SPDX-License-Identifier: AGPL-3.0-only
"""The container backend: OCI bundles and the runtime that runs them."""
