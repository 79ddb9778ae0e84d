# SPDX-License-Identifier: AGPL-3.0-only
"""The hook interface and the two ways through a list of hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from opendsec_server.node import crash
from opendsec_server.node.sandbox import Sandbox


class Hook(Protocol):
    """One step."""

    name: str

    async def setup(self, box: Sandbox) -> None:
        """Make this step's things.

        Raises:
            OpendsecError: it cannot; what was made stays for ``teardown``.
        """

    async def teardown(self, box: Sandbox) -> None:
        """Remove this step's things. Idempotent; safe without ``setup``.

        Raises:
            Exception: something is left; other hooks are torn down all the same.
        """


async def set_up(hooks: Sequence[Hook], box: Sandbox, check: Callable[[], None]) -> None:
    """Run every set-up in order; ``check`` is called before each and may raise to stop."""
    for hook in hooks:
        check()
        crash.point(f"{hook.name}:before")
        await hook.setup(box)
        crash.point(f"{hook.name}:after")
    check()


async def tear_down(hooks: Sequence[Hook], box: Sandbox) -> list[tuple[str, Exception]]:
    """Run every teardown in reverse order, whatever fails; return what failed, by hook."""
    failures: list[tuple[str, Exception]] = []
    for hook in reversed(hooks):
        crash.point(f"teardown.{hook.name}:before")
        try:
            await hook.teardown(box)
        except Exception as exc:
            failures.append((hook.name, exc))
        crash.point(f"teardown.{hook.name}:after")
    return failures
