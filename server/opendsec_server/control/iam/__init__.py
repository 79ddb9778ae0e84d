# SPDX-License-Identifier: AGPL-3.0-only
"""Who may do what: projects that nest, principals, roles, keys and tokens."""

from .caller import Caller, KnownRefused
from .principals import Principals
from .projects import Projects
from .rights import Right
from .service import Iam
from .tokens import Tokens

__all__ = ["Caller", "Iam", "KnownRefused", "Principals", "Projects", "Right", "Tokens"]
