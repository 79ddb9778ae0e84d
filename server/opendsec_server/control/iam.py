# SPDX-License-Identifier: AGPL-3.0-only
"""Who may do what: projects and their API keys."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from collections import OrderedDict
from pathlib import Path

import msgspec
import structlog

from opendsec_server.config import ConfigError
from opendsec_server.contract import limits
from opendsec_server.contract.errors import NotFound, StoreUnavailable, Unauthenticated
from opendsec_server.contract.ids import random_chars
from opendsec_server.store import accounts
from opendsec_server.store.records import ApiKey, Project
from opendsec_server.store.store import Store

from .params import check_text
from .tokens import write_private

log = structlog.get_logger(__name__)

KEY_RE = re.compile(r"e2b_[0-9a-f]{40}")
CACHE_TTL_S = 30.0
CACHE_STALE_S = 900.0
"""How long a key seen before is still believed while the store does not answer."""
CACHE_ENTRIES_MAX = 10_000


class Caller(msgspec.Struct, kw_only=True, frozen=True):
    """The project in whose name a request is made."""

    project: Project
    key_id: str

    @property
    def project_id(self) -> str:
        """Scope of everything the caller sees."""
        return self.project.project_id


class _Cached(msgspec.Struct):
    caller: Caller
    sha256: str
    checked_at: float


class Iam:
    """Checks and manages API keys."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._cache: OrderedDict[str, _Cached] = OrderedDict()
        self._first_project_id: str | None = None

    async def authenticate(self, key: str | None) -> Caller:
        """The caller that a key stands for.

        Raises:
            Unauthenticated: no key, or not one of ours.
            StoreUnavailable: the key was not seen lately, and cannot be looked up.
        """
        if key is None:
            raise Unauthenticated("no API key was sent")
        if KEY_RE.fullmatch(key) is None:
            raise Unauthenticated("the API key is not valid")
        digest = hashlib.sha256(key.encode()).hexdigest()
        now = time.monotonic()
        cached = self._cache.get(digest)
        if cached is not None and now - cached.checked_at < CACHE_TTL_S:
            return cached.caller
        try:
            found = await accounts.key_with_project(self._store, digest)
        except StoreUnavailable:
            if cached is not None and now - cached.checked_at < CACHE_STALE_S:
                return cached.caller
            raise
        if found is None or not hmac.compare_digest(found[0].sha256, digest):
            self._cache.pop(digest, None)
            raise Unauthenticated("the API key is not valid")
        caller = Caller(project=found[1], key_id=found[0].key_id)
        self._cache[digest] = _Cached(caller, digest, now)
        self._cache.move_to_end(digest)
        if len(self._cache) > CACHE_ENTRIES_MAX:
            self._cache.popitem(last=False)
        return caller

    async def operates(self, caller: Caller) -> bool:
        """Whether the caller acts for the installation: its project is the first one."""
        if self._first_project_id is None:
            self._first_project_id = await accounts.first_project_id(self._store)
        return caller.project_id == self._first_project_id

    async def create_key(self, caller: Caller, name: str) -> tuple[ApiKey, str]:
        """Make another key for the caller's project. The key itself is shown only here.

        Raises:
            InvalidRequest: the name is empty, too long, or has NUL.
        """
        check_text("name", name, limits.NAME_CHARS_MAX)
        secret = _new_key()
        key = _key_record(caller.project_id, name, secret)
        await accounts.insert_key(self._store, key)
        log.info("api key made", key_id=key.key_id, project=caller.project_id)
        return key, secret

    async def keys(self, caller: Caller) -> list[ApiKey]:
        """The keys of the caller's project, oldest first."""
        return await accounts.keys_of(self._store, caller.project_id)

    async def delete_key(self, caller: Caller, key_id: str) -> None:
        """Remove a key; it is refused from now on.

        Raises:
            NotFound: the caller's project has no such key.
            Conflict: it is the last one.
        """
        key = await accounts.delete_key(self._store, caller.project_id, key_id)
        if key is None:
            raise NotFound("there is no such API key in this project")
        self._cache.pop(key.sha256, None)
        log.info("api key deleted", key_id=key.key_id, project=caller.project_id)

    async def ensure_first_key(self, key_file: Path) -> None:
        """At the first start, make a project and a key, and write the key to a file (0600).

        A key that the file already holds is registered again, so that an emptied store does
        not change what clients were given.

        Raises:
            ConfigError: the file cannot be written or read.
        """
        if await accounts.any_key(self._store):
            return
        try:
            secret = await asyncio.to_thread(_key_in_file, key_file)
        except OSError as exc:
            raise ConfigError(f"cannot use the key file {key_file}: {exc.strerror}") from exc
        now = time.time()
        project = Project(
            project_id=f"p{random_chars(15)}",
            name="default",
            sandboxes_max=limits.PROJECT_SANDBOXES_MAX_DEFAULT,
            created_at=now,
        )
        await accounts.insert_project(
            self._store, project, _key_record(project.project_id, "first", secret)
        )
        log.info("first api key made", file=str(key_file), project=project.project_id)


def _new_key() -> str:
    return f"e2b_{secrets.token_hex(20)}"


def _key_record(project_id: str, name: str, secret: str) -> ApiKey:
    return ApiKey(
        key_id=f"k{random_chars(15)}",
        project_id=project_id,
        name=name,
        sha256=hashlib.sha256(secret.encode()).hexdigest(),
        hint=f"{secret[:6]}…{secret[-4:]}",
        created_at=time.time(),
    )


def _key_in_file(path: Path) -> str:
    if path.exists():
        text = path.read_text(errors="replace").strip()
        if KEY_RE.fullmatch(text):
            path.chmod(0o600)
            return text
    secret = _new_key()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private(path, f"{secret}\n".encode())
    return secret
