# SPDX-License-Identifier: AGPL-3.0-only
"""Templates: registering them, and finding the one that a caller names."""

from __future__ import annotations

import re
import time

import msgspec

from opendsec_server.contract import limits
from opendsec_server.contract.errors import InvalidRequest, TemplateNotFound
from opendsec_server.contract.ids import random_chars
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


BASE_TEMPLATE = TemplateDefinition(name="base", image="base")


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
        parts = _REFERENCE_RE.fullmatch(reference[: limits.NAME_CHARS_MAX + 1])
        if parts is None or len(reference) > limits.NAME_CHARS_MAX:
            raise InvalidRequest(
                f"template: `{reference[:64]}` is not a template reference",
                remediation="Use a template's name or id: lower-case letters, digits, `-`, `_`.",
            )
        scope, name, tag = parts["scope"], parts["name"], parts["tag"] or DEFAULT_TAG
        for template in await self._templates():
            if (
                name in (template.name, template.template_id)
                and tag == DEFAULT_TAG
                and scope in (None, template.project_id)
                and _may_use(caller, template)
            ):
                return template
        raise TemplateNotFound(f"there is no template `{reference}`")

    async def id_to_list(self, caller: Caller, reference: str | None) -> str | None:
        """The template id that a list is filtered by. None: no filter.

        An unknown template makes an empty list, not an error: its id matches nothing.

        Raises:
            InvalidRequest: not a reference.
        """
        if reference is None:
            return None
        try:
            return (await self.resolve(caller, reference)).template_id
        except TemplateNotFound:
            return ""

    async def _templates(self) -> list[Template]:
        now = time.monotonic()
        if now - self._read_at >= CACHE_TTL_S:
            self._all = await accounts.all_templates(self._store)
            self._read_at = now
        return self._all


def _may_use(caller: Caller, template: Template) -> bool:
    return template.public or template.project_id in (None, caller.project_id)
