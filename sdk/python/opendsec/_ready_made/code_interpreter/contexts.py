# SPDX-License-Identifier: Apache-2.0
"""Which contexts there are."""

from __future__ import annotations

import asyncio
from pathlib import Path

from .kernels import Context
from .languages import Language

_HOME = Path("/home/user")
CONTEXTS_MAX = 64
"""Each is a process with tens of megabytes."""


class TooManyContexts(Exception):
    """There is no room for another one."""


class Contexts:
    """The sandbox's contexts. Each language has a default one, made when it is first used."""

    def __init__(self) -> None:
        self._all: dict[str, Context] = {}
        self._defaults: dict[str, Context] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def list(self) -> list[Context]:
        """All of them, oldest first."""
        return [*self._all.values()]

    def get(self, context_id: str) -> Context | None:
        """The one of that id."""
        return self._all.get(context_id)

    async def default(self, language: Language) -> Context:
        """The one in which code of a language runs if nothing else is said.

        Raises:
            TooManyContexts, RuntimeError: it cannot be made.
        """
        async with self._locks.setdefault(language.name, asyncio.Lock()):
            context = self._defaults.get(language.name)
            if context is None or context.context_id not in self._all:
                context = await self.create(language, None)
                self._defaults[language.name] = context
            return context

    async def create(self, language: Language, cwd: str | None) -> Context:
        """Make another one.

        Args:
            language: Its language.
            cwd: Its working directory. None: the user's home.

        Raises:
            TooManyContexts, RuntimeError, NotADirectoryError: it cannot be made.
        """
        if len(self._all) >= CONTEXTS_MAX:
            raise TooManyContexts(f"there are {CONTEXTS_MAX} contexts; remove one first")
        context = Context(language, _directory(cwd))
        # In the count at once: kernels take their time to start.
        self._all[context.context_id] = context
        try:
            await context.start()
        except BaseException:
            del self._all[context.context_id]
            raise
        return context

    async def remove(self, context_id: str) -> bool:
        """End one of them; False if there is none of that id."""
        context = self._all.pop(context_id, None)
        if context is None:
            return False
        await context.close()
        return True

    async def close(self) -> None:
        """End all of them."""
        for context in self.list():
            await self.remove(context.context_id)


def _directory(cwd: str | None) -> str:
    directory = _HOME if cwd is None else Path(cwd)
    if not directory.is_dir():
        raise NotADirectoryError(f"{directory} is not a directory")
    return str(directory)
