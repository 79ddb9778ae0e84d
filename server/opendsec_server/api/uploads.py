# SPDX-License-Identifier: AGPL-3.0-only
"""Where callers of both APIs send the archives of their builds. The address is signed: the clients
send no key with it."""

from __future__ import annotations

import hmac
import time
from urllib.parse import quote, urlencode

from litestar import Response, put
from litestar.params import FromPath

from opendsec_server.contract.errors import InvalidRequest, Unauthenticated
from opendsec_server.control.builds.uploads import URL_VALID_S

from .http import Query, Request, no_content, segment, services_of


def upload_url(request: Request, project_id: str, template_id: str, files_hash: str) -> str:
    """The address for one archive of a project, valid for an hour."""
    expires = str(int(time.time()) + URL_VALID_S)
    query = urlencode(
        {
            "project": project_id,
            "expires": expires,
            "signature": services_of(request).mint.upload(project_id, files_hash, expires),
        }
    )
    path = f"/templates/{quote(template_id, safe='')}/files/{files_hash}/content"
    return f"{_base_url(request)}{path}?{query}"


def _base_url(request: Request) -> str:
    """As the caller reached us: what it can reach again."""
    proto = request.headers.get("x-forwarded-proto", "http").partition(",")[0].strip()
    host = request.headers.get("x-forwarded-host") or request.headers.get("host") or ""
    return f"{'https' if proto == 'https' else 'http'}://{host.partition(',')[0].strip()}"


@put("/templates/{template_id:str}/files/{files_hash:str}/content", request_max_body_size=None)
async def upload(
    request: Request, template_id: FromPath[str], files_hash: FromPath[str]
) -> Response[None]:
    """Takes an archive. The address is signed, so that no key is needed."""
    services, query = services_of(request), Query(request)
    name, project_id = segment(files_hash), query.text("project") or ""
    expires, signature = query.text("expires") or "", query.text("signature") or ""
    expected = services.mint.upload(project_id, name, expires)
    if not hmac.compare_digest(signature.encode(), expected.encode()):
        raise Unauthenticated("the address to send files to is not valid")
    if not expires.isdigit() or int(expires) < time.time():
        raise Unauthenticated(
            "the address to send files to has expired", remediation="Ask for a new one."
        )
    length = request.headers.get("content-length")
    if length is not None and not length.isdigit():
        raise InvalidRequest("Content-Length: not a number")
    await services.builds.uploads.receive(
        project_id,
        name,
        request.stream(),
        length_bytes=None if length is None else int(length),
    )
    return no_content()


HANDLERS = [upload]
