# SPDX-License-Identifier: AGPL-3.0-only
"""Who may do what: projects that nest, principals, roles, keys and tokens."""

from .caller import Caller
from .rights import Right
from .service import Iam

__all__ = ["Caller", "Iam", "Right"]
