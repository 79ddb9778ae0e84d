# SPDX-License-Identifier: AGPL-3.0-only
"""What a microVM boots: the distribution's packaged kernel and an initramfs around our agent.

``ensure_guest`` makes it once and keeps it; ``guest_cmdline`` says to the guest what it is made of.
"""

from .build import GuestImage, ensure_guest
from .cmdline import guest_cmdline
from .tools import GuestBuildError

__all__ = ["GuestBuildError", "GuestImage", "ensure_guest", "guest_cmdline"]
