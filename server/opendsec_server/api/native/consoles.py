# SPDX-License-Identifier: AGPL-3.0-only
"""``/v1/sandboxes/{id}/console``: what a machine printed.

The same path asked for as a WebSocket, and ``…/vnc``, are served by the edge itself: they carry
bytes between the client and the machine monitor.
"""

from __future__ import annotations

from litestar import Response, get
from litestar.params import FromPath

from opendsec_server.api.http import Request, answer, caller_of, segment, services_of
from opendsec_server.contract.errors import NodeUnavailable, NotSupported, SandboxNotFound

from . import schemas
from .documented import Operation, documented
from .sandboxes import TAG


@get(
    "/sandboxes/{sandbox_id:str}/console",
    opt=documented(
        Operation(
            tag=TAG,
            right="sandboxes:connect",
            summary="Read the end of a machine's serial console",
            description="Only of backends with the capability `console`. As a WebSocket (with the "
            "sandbox's access token in `X-Access-Token`, or as the subprotocol "
            "`opendsec.token.<token>` beside `binary`) the same path is the console itself: bytes "
            "both ways, one client at a time. `/v1/sandboxes/{sandbox_id}/vnc` is the screen: the "
            "RFB protocol in binary messages, as noVNC speaks it.",
            response=schemas.Console,
            errors=(SandboxNotFound, NotSupported, NodeUnavailable),
        )
    ),
)
async def read_console(request: Request, sandbox_id: FromPath[str]) -> Response[bytes]:
    services = services_of(request)
    record = await services.lifecycle.get_live(caller_of(request), segment(sandbox_id))
    return answer(schemas.Console(text=await services.node.console_tail(record.sandbox_id)))


HANDLERS = [read_console]
