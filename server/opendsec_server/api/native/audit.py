# SPDX-License-Identifier: AGPL-3.0-only
"""``/v1/audit``: the log of calls, its export and its check."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec
from litestar import Response, get
from litestar.response import Stream

from opendsec_server.api.http import Query, Request, answer, caller_of, services_of
from opendsec_server.api.ndjson import done, ndjson
from opendsec_server.contract.errors import Forbidden, InvalidRequest
from opendsec_server.store import audit

from . import iam_schemas as schemas
from .documented import Operation, Parameter, documented

PAGE_MAX = 1_000
_FILTERS = (
    Parameter(
        name="actor", description="Principal, or key of a project.", schema={"type": "string"}
    ),
    Parameter(
        name="object",
        description="What calls were about: all of it, or one of several.",
        schema={"type": "string"},
    ),
    Parameter(name="outcome", description="`ok`, or an error's code.", schema={"type": "string"}),
    Parameter(name="since", description="Unix seconds.", schema={"type": "number"}),
    Parameter(name="until", description="Unix seconds.", schema={"type": "number"}),
    Parameter(
        name="after",
        description="`next_after` of the page before, or `seq` of the last entry that is known.",
        schema={"type": "integer", "minimum": 0, "default": 0},
    ),
)


@get(
    "/audit",
    opt=documented(
        Operation(
            tag="audit",
            summary="Read the audit log",
            description="Calls in the caller's project and those below it, oldest first. The "
            "installation's first project sees all, also those of nobody.",
            response=schemas.AuditPage,
            parameters=(
                *_FILTERS,
                Parameter(
                    name="limit",
                    description="Entries per page.",
                    schema={"type": "integer", "minimum": 1, "maximum": PAGE_MAX, "default": 100},
                ),
            ),
            errors=(InvalidRequest, Forbidden),
        )
    ),
)
async def read_audit(request: Request) -> Response[bytes]:
    query = Query(request)
    wanted = _filter(query, query.integer("limit", 100, at_least=1, at_most=PAGE_MAX))
    found = await services_of(request).audit.page(caller_of(request), wanted)
    full = len(found) == wanted.limit
    return answer(
        schemas.AuditPage(
            entries=[_entry(entry) for entry in found],
            next_after=found[-1].seq if full else None,
        )
    )


@get(
    "/audit/export",
    opt=documented(
        Operation(
            tag="audit",
            summary="Export the audit log",
            description="As lines of JSON, one entry each, to the end of the log; the last line is "
            '`{"done": {"entries": …}}`. A whole export can be checked without the server.',
            parameters=_FILTERS,
            errors=(InvalidRequest, Forbidden),
        )
    ),
)
async def export_audit(request: Request) -> Stream:
    services, caller = services_of(request), caller_of(request)
    first = _filter(Query(request), PAGE_MAX)

    async def lines() -> AsyncGenerator[object, None]:
        wanted, count = first, 0
        while True:
            found = await services.audit.page(caller, wanted)
            for entry in found:
                yield _entry(entry)
            count += len(found)
            if len(found) < PAGE_MAX:
                break
            wanted = msgspec.structs.replace(wanted, after=found[-1].seq)
        yield done(entries=count)

    return ndjson(request, lines())


@get(
    "/audit/verify",
    opt=documented(
        Operation(
            tag="audit",
            summary="Check the audit log",
            description="Reads all of it: nothing was changed, removed or added. Only for the "
            "installation's first project.",
            response=schemas.AuditVerdict,
            errors=(Forbidden,),
        )
    ),
)
async def verify_audit(request: Request) -> Response[bytes]:
    verdict = await services_of(request).audit.verify(caller_of(request))
    return answer(schemas.AuditVerdict(**msgspec.structs.asdict(verdict)))


def _filter(query: Query, limit: int) -> audit.AuditFilter:
    return audit.AuditFilter(
        project_id=None,
        actor_id=_text(query, "actor"),
        object=_text(query, "object"),
        outcome=_text(query, "outcome"),
        since=query.seconds("since"),
        until=query.seconds("until"),
        after=query.integer("after", 0, at_least=0),
        limit=limit,
    )


def _text(query: Query, name: str) -> str | None:
    text = query.text(name)
    if text is not None and "\0" in text:
        raise InvalidRequest(f"{name}: NUL is not allowed")
    return text


def _entry(entry: audit.AuditEntry) -> schemas.AuditEntry:
    return schemas.AuditEntry(**msgspec.structs.asdict(entry))


HANDLERS = [read_audit, export_audit, verify_audit]
