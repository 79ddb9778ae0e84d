# SPDX-License-Identifier: AGPL-3.0-only
"""Finds out what a key or token may do, and manages the keys of projects."""

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
from opendsec_server.contract.errors import (
    Forbidden,
    NotFound,
    StoreUnavailable,
    Unauthenticated,
)
from opendsec_server.contract.ids import random_chars
from opendsec_server.control.params import check_text
from opendsec_server.control.tokens import write_private
from opendsec_server.store import accounts, principals
from opendsec_server.store.packing import pack_list, unpack_list
from opendsec_server.store.principals import Credential
from opendsec_server.store.records import ApiKey, Project
from opendsec_server.store.store import Store

from .caller import Caller, KnownRefused
from .rights import EVERYTHING, ROLES, Right, both, missing

log = structlog.get_logger(__name__)

KEY_RE = re.compile(r"e2b_[0-9a-f]{40}")
TOKEN_RE = re.compile(r"e2b_[0-9a-f]{64}")
"""Begins as a key does: E2B's clients send nothing else."""
CACHE_TTL_S = 30.0
"""How long another process may still believe what was changed here."""
CACHE_STALE_S = 900.0
"""How long a key seen before is still believed while the store does not answer."""
CACHE_ENTRIES_MAX = 10_000


class _Cached(msgspec.Struct):
    caller: Caller
    checked_at: float


class Iam:
    """Checks keys and tokens, and manages API keys."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._cache: OrderedDict[tuple[str, str | None], _Cached] = OrderedDict()
        self._first_project_id: str | None = None

    async def authenticate(self, key: str | None, project_id: str | None = None) -> Caller:
        """The caller that a key or token stands for.

        Args:
            key: As it was shown.
            project_id: Where to use it. None: its own project.

        Raises:
            Unauthenticated: nothing was shown, or not one of ours, or it has ended.
            Forbidden: it has no rights in that project.
            StoreUnavailable: it was not seen lately, and cannot be looked up.
        """
        if key is None:
            raise Unauthenticated("no API key was sent")
        if KEY_RE.fullmatch(key) is None and TOKEN_RE.fullmatch(key) is None:
            raise Unauthenticated("the API key is not valid")
        digest = hashlib.sha256(key.encode()).hexdigest()
        name = (digest, project_id)
        now = time.monotonic()
        cached = self._cache.get(name)
        if cached is not None and now - cached.checked_at < CACHE_TTL_S:
            return _unless_over(cached.caller)
        try:
            found = await principals.find_credential(
                self._store, digest, project_id, now=time.time()
            )
        except StoreUnavailable:
            if cached is not None and now - cached.checked_at < CACHE_STALE_S:
                return _unless_over(cached.caller)
            raise
        shown = None if found is None else (found.token or found.key)
        if found is None or shown is None or not hmac.compare_digest(shown.sha256, digest):
            self._cache.pop(name, None)
            raise Unauthenticated("the API key is not valid")
        try:
            caller = _caller_of(found, project_id)
        except (Forbidden, Unauthenticated):
            self._cache.pop(name, None)
            raise
        self._cache[name] = _Cached(caller, now)
        self._cache.move_to_end(name)
        if len(self._cache) > CACHE_ENTRIES_MAX:
            self._cache.popitem(last=False)
        return caller

    def forget(self) -> None:
        """Look everything up again: rights have changed."""
        self._cache.clear()

    async def operates(self, caller: Caller) -> bool:
        """Whether the caller acts for the installation: its project is the first one."""
        return await self.is_first(caller.project_id)

    async def is_first(self, project_id: str) -> bool:
        """Whether a project is that of the installation itself."""
        if self._first_project_id is None:
            self._first_project_id = await accounts.first_project_id(self._store)
        return project_id == self._first_project_id

    async def create_key(self, caller: Caller, name: str) -> tuple[ApiKey, str]:
        """Make another key for the caller's project. The key itself is shown only here.

        It may do what the caller may, and is the caller's principal's if there is one.

        Raises:
            InvalidRequest: the name is empty, too long, or has NUL.
            Forbidden: the caller came with a token, which ends; a key does not.
        """
        refuse_token(caller)
        check_text("name", name, limits.NAME_CHARS_MAX)
        secret = _new_key()
        key = _key_record(caller.project_id, name, secret)
        if caller.rights != EVERYTHING:
            key = msgspec.structs.replace(key, rights=pack_list(sorted(caller.rights)))
        key = msgspec.structs.replace(key, principal_id=caller.principal_id)
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
            Forbidden: a key of the project itself that may do what the caller may not.
            Conflict: it is the last one.
        """
        for one in await self.keys(caller):
            if one.key_id == key_id and one.principal_id is None:
                held = EVERYTHING if one.rights is None else unpack_list(one.rights)
                if missing(caller.rights, held):
                    raise Forbidden(
                        "this key may do what you may not",
                        remediation="Have it deleted by who may do everything in the project.",
                    )
        key = await accounts.delete_key(self._store, caller.project_id, key_id)
        if key is None:
            raise NotFound("there is no such API key in this project")
        self.forget()
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


def refuse_token(caller: Caller) -> None:
    """Go on only with a key.

    Raises:
        Forbidden: the caller came with a token.
    """
    if caller.token_id is not None:
        raise Forbidden(
            "a token cannot make keys or grants, which do not end as it does",
            remediation="Use a key, or make a token.",
        )


def new_key(project_id: str, name: str, *, principal_id: str | None = None) -> tuple[ApiKey, str]:
    """A key, not yet recorded, and the secret that it stands for."""
    secret = _new_key()
    key = _key_record(project_id, name, secret)
    return msgspec.structs.replace(key, principal_id=principal_id), secret


def _caller_of(found: Credential, project_id: str | None) -> Caller:
    """Raises: Forbidden, Unauthenticated."""
    if found.disabled:
        raise Unauthenticated("the principal of this key is switched off")
    rights = _rights_of(found)
    project = found.project
    if project is None or project.closed_at is not None or not rights:
        own_project_id = (found.token or found.key).project_id
        raise KnownRefused(
            f"this key has no rights in project `{(project_id or own_project_id)[:80]}`",
            actor_id=found.key.principal_id or found.key.key_id,
            credential_id=found.token.token_id if found.token else found.key.key_id,
            own_project_id=own_project_id,
        )
    token = found.token
    return Caller(
        project=project,
        key_id=found.key.key_id,
        principal_id=found.key.principal_id,
        token_id=None if token is None else token.token_id,
        rights=rights,
        sandbox_id=None if token is None else token.sandbox_id,
        expires_at=None if token is None else token.expires_at,
    )


def _rights_of(found: Credential) -> frozenset[Right]:
    """What a credential may do in the project that it is used in."""
    key, token = found.key, found.token
    rights: frozenset[Right] = frozenset()
    if key.principal_id is not None:
        for grant in found.grants:
            rights |= frozenset(grant.rights)
            if grant.role is not None:
                rights |= ROLES.get(grant.role, frozenset())
    elif key.project_id in found.line:
        rights = EVERYTHING
    if key.rights is not None:
        rights = both(rights, unpack_list(key.rights))
    if token is not None:
        if found.line.isdisjoint(token.projects):
            return frozenset()
        rights = both(rights, token.rights)
    return EVERYTHING if "*" in rights else rights


def _unless_over(caller: Caller) -> Caller:
    if caller.expires_at is not None and caller.expires_at <= time.time():
        raise Unauthenticated("the API key is not valid")
    return caller


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
