# SPDX-License-Identifier: AGPL-3.0-only
"""Templates: registering them, and finding the one that a caller names."""

from __future__ import annotations

import re
import time

import msgspec

from opendsec_server.contract import limits
from opendsec_server.contract.errors import InvalidRequest, TemplateNotFound
from opendsec_server.contract.ids import random_chars
from opendsec_server.contract.node import Backend
from opendsec_server.store import accounts
from opendsec_server.store.records import Template
from opendsec_server.store.store import Store

from .iam import Caller

DEFAULT_TAG = "default"
TEMPLATE_ID_CHARS = 20
CACHE_TTL_S = 10.0
_REFERENCE_RE = re.compile(
    r"(?:(?P<scope>[a-z0-9_-]+)/)?(?P<name>[a-z0-9_-]+)(?::(?P<tag>[a-z0-9_.-]+))?"
)


class TemplateDefinition(msgspec.Struct, kw_only=True, frozen=True):
    """A template of the installation, open to every project."""

    name: str
    image: str
    cpu: float = limits.CPU_DEFAULT
    memory_mb: int = limits.MEMORY_MB_DEFAULT
    disk_mb: int = limits.DISK_MB_DEFAULT
    default_user: str = "user"
    default_workdir: str | None = None
    backend: Backend | None = None
    """The only backend that can start it. None: any that starts layers."""


class Reference(msgspec.Struct, kw_only=True, frozen=True):
    """How a caller names a template or snapshot: ``id``, ``name``, ``name:tag``, ``scope/name``."""

    scope: str | None
    """A project's id. None: the caller's, and the installation's templates."""
    name: str
    """Name or id."""
    tag: str | None


BASE_TEMPLATE = TemplateDefinition(name="base", image="base")


def parse_reference(text: str) -> Reference:
    """Take a reference apart.

    Raises:
        InvalidRequest: not a reference.
    """
    parts = _REFERENCE_RE.fullmatch(text[: limits.NAME_CHARS_MAX + 1])
    if parts is None or len(text) > limits.NAME_CHARS_MAX:
        raise InvalidRequest(
            f"template: `{text[:64]}` is not a template reference",
            remediation="Use the name or id of a template or snapshot: lower-case letters, "
            "digits, `-`, `_`.",
        )
    return Reference(scope=parts["scope"], name=parts["name"], tag=parts["tag"])


class Templates:
    """The templates that exist. Few and seldom changed, so they are kept in memory."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._all: list[Template] = []
        self._read_at = float("-inf")

    async def register(self, definition: TemplateDefinition) -> Template:
        """Add a template of the installation, or bring it up to date."""
        now = time.time()
        template = await accounts.put_template(
            self._store,
            Template(
                template_id=random_chars(TEMPLATE_ID_CHARS),
                project_id=None,
                name=definition.name,
                image=definition.image,
                public=True,
                cpu=definition.cpu,
                memory_mb=definition.memory_mb,
                disk_mb=definition.disk_mb,
                default_user=definition.default_user,
                default_workdir=definition.default_workdir,
                created_at=now,
                updated_at=now,
                backend=definition.backend,
            ),
        )
        self._read_at = float("-inf")
        return template

    async def visible(self, caller: Caller) -> list[Template]:
        """The templates that a caller may use, oldest first."""
        return [t for t in await self._templates() if _may_use(caller, t)]

    async def use(self) -> dict[str, tuple[int, float]]:
        """How often each template was used, and when last."""
        return await accounts.template_use(self._store)

    async def by_id(self, template_id: str) -> Template | None:
        """The template with this id, whoever owns it."""
        return next((t for t in await self._templates() if t.template_id == template_id), None)

    async def resolve(self, caller: Caller, reference: str) -> Template:
        """The template that ``id``, ``name``, ``name:default`` or ``scope/name`` means.

        Raises:
            InvalidRequest: not a reference.
            TemplateNotFound: there is none of that name, or it is not the caller's.
        """
        wanted = parse_reference(reference)
        template = await self.find(caller, wanted)
        if template is None:
            raise TemplateNotFound(f"there is no template `{reference}`")
        return template

    async def find(self, caller: Caller, wanted: Reference) -> Template | None:
        """The template that a reference means, if it is there and the caller may use it."""
        if wanted.tag not in (None, DEFAULT_TAG):
            return None
        for template in await self._templates():
            if (
                wanted.name in (template.name, template.template_id)
                and wanted.scope in (None, template.project_id)
                and _may_use(caller, template)
            ):
                return template
        return None

    async def _templates(self) -> list[Template]:
        now = time.monotonic()
        if now - self._read_at >= CACHE_TTL_S:
            self._all = await accounts.all_templates(self._store)
            self._read_at = now
        return self._all


def _may_use(caller: Caller, template: Template) -> bool:
    return template.public or template.project_id in (None, caller.project_id)
