# SPDX-License-Identifier: AGPL-3.0-only
"""The public API: native under ``/v1``, E2B's paths, and the operators' ones, on one socket."""

from __future__ import annotations

from litestar import Litestar, Router
from litestar.datastructures import State
from litestar.types import ASGIApp

from opendsec_server.contract.limits import API_BODY_BYTES_MAX
from opendsec_server.control.services import Services

from . import ops, uploads
from .audited import Audited
from .auth import require_key
from .e2b import handlers as e2b
from .errors import handle_error
from .native import (
    account,
    audit,
    batches,
    builds,
    bulk,
    consoles,
    functions,
    groups,
    iam,
    images,
    nodes,
    sandboxes,
    states,
    tasks,
    templates,
    trajectories,
)
from .native.openapi import document_handler
from .observe import Observed

NATIVE_PREFIX = "/v1"


def build_api_app(services: Services) -> ASGIApp:
    """The application for ``config.api_socket``."""
    native = [
        *sandboxes.HANDLERS,
        *batches.HANDLERS,
        *bulk.HANDLERS,
        *states.HANDLERS,
        *tasks.HANDLERS,
        *trajectories.HANDLERS,
        *consoles.HANDLERS,
        *images.HANDLERS,
        *nodes.HANDLERS,
        *templates.HANDLERS,
        *builds.HANDLERS,
        *functions.HANDLERS,
        *groups.HANDLERS,
        *account.HANDLERS,
        *iam.HANDLERS,
        *audit.HANDLERS,
    ]
    app = Litestar(
        [
            *ops.HANDLERS,
            *e2b.OPEN_HANDLERS,
            *uploads.HANDLERS,
            document_handler(native, NATIVE_PREFIX),
            Router(NATIVE_PREFIX, route_handlers=native, guards=[require_key]),
            Router("/", route_handlers=e2b.HANDLERS, guards=[require_key]),
        ],
        openapi_config=None,
        logging_config=None,
        exception_handlers={Exception: handle_error},
        request_max_body_size=API_BODY_BYTES_MAX,
        state=State({"services": services}, deep_copy=False),
    )
    audited = Audited(app, services.audit, reads=services.config.audit_reads)
    return Observed(audited, services.metrics)
