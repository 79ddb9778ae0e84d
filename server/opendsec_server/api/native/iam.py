# SPDX-License-Identifier: AGPL-3.0-only
"""``/v1``: projects that nest, principals and what they are granted, tokens."""

from __future__ import annotations

import msgspec
from litestar import Response, delete, get, patch, post, put
from litestar.params import FromPath
from msgspec import UNSET

from opendsec_server.api.http import (
    Query,
    Request,
    about,
    answer,
    caller_of,
    no_content,
    read_json,
    rfc3339,
    segment,
    services_of,
)
from opendsec_server.contract.errors import (
    Conflict,
    Forbidden,
    InvalidRequest,
    NotFound,
    SandboxNotFound,
)
from opendsec_server.control.iam.rights import ROLES
from opendsec_server.store import principals, projects

from . import iam_schemas as schemas
from .convert import key_of
from .documented import ANY_RIGHT, BODY, Operation, Parameter, documented
from .schemas import NewApiKey

_create_project = msgspec.json.Decoder(schemas.CreateProject)
_change_project = msgspec.json.Decoder(schemas.ChangeProject)
_create_principal = msgspec.json.Decoder(schemas.CreatePrincipal)
_change_principal = msgspec.json.Decoder(schemas.ChangePrincipal)
_put_grant = msgspec.json.Decoder(schemas.PutGrant)
_create_key = msgspec.json.Decoder(schemas.CreatePrincipalKey)
_create_token = msgspec.json.Decoder(schemas.CreateToken)


def _project(state: projects.ProjectState) -> schemas.ProjectState:
    project = state.project
    return schemas.ProjectState(
        project_id=project.project_id,
        name=project.name,
        parent_id=project.parent_id,
        depth=project.depth,
        created_at=rfc3339(project.created_at),
        closed_at=None if project.closed_at is None else rfc3339(project.closed_at),
        quota=msgspec.convert(state.limits, schemas.Quota),
        use=msgspec.convert(state.use, schemas.Use),
        handed_on=msgspec.convert(state.handed_on, schemas.HandedOn),
    )


def _principal(principal: principals.Principal) -> schemas.Principal:
    return schemas.Principal(
        principal_id=principal.principal_id,
        project_id=principal.project_id,
        kind=principal.kind,
        name=principal.name,
        created_at=rfc3339(principal.created_at),
        disabled=principal.disabled_at is not None,
    )


def _grant(grant: principals.Grant) -> schemas.Grant:
    return schemas.Grant(
        principal_id=grant.principal_id,
        project_id=grant.project_id,
        role=grant.role,
        rights=grant.rights,
        granted_by=grant.granted_by,
        created_at=rfc3339(grant.created_at),
    )


def _token(token: principals.Token) -> schemas.Token:
    return schemas.Token(
        token_id=token.token_id,
        name=token.name,
        project_id=token.project_id,
        projects=token.projects,
        rights=token.rights,
        sandbox_id=token.sandbox_id,
        principal_id=token.principal_id,
        key_id=token.key_id,
        parent_id=token.parent_id,
        created_at=rfc3339(token.created_at),
        expires_at=rfc3339(token.expires_at),
    )


@get(
    "/caller",
    opt=documented(
        Operation(
            tag="projects",
            right=ANY_RIGHT,
            summary="Whom the key or token stands for",
            description="With its rights in the project that it acts in. Every key and token may "
            "ask.",
            response=schemas.CallerState,
        )
    ),
)
async def get_caller(request: Request) -> Response[bytes]:
    caller = caller_of(request)
    return answer(
        schemas.CallerState(
            project_id=caller.project_id,
            project=caller.project.name,
            key_id=caller.key_id,
            principal_id=caller.principal_id,
            token_id=caller.token_id,
            rights=sorted(caller.rights),
            sandbox_id=caller.sandbox_id,
            expires_at=None if caller.expires_at is None else rfc3339(caller.expires_at),
            operator=await services_of(request).iam.operates(caller),
        )
    )


@get(
    "/projects",
    opt=documented(
        Operation(
            tag="projects",
            summary="List projects",
            description="The caller's project and all below it, parents first.",
            response=schemas.ProjectList,
            parameters=(
                Parameter(
                    name="closed",
                    description="`true`: also those that are closed.",
                    schema={"type": "boolean", "default": False},
                ),
            ),
        )
    ),
)
async def list_projects(request: Request) -> Response[bytes]:
    closed = Query(request).text("closed") == "true"
    found = await services_of(request).projects.list(caller_of(request), closed=closed)
    return answer(schemas.ProjectList(projects=[_project(state) for state in found]))


@post(
    "/projects",
    opt=documented(
        Operation(
            tag="projects",
            right="projects:admin",
            summary="Make a project",
            description="Below the caller's project, or below one that is. It is handed on a part "
            "of what its parent has: the parts never sum to more. To get in, make an API key with "
            "`X-Project-Id` naming it, or grant a principal something there.",
            request=schemas.CreateProject,
            response=schemas.ProjectState,
            status=201,
            errors=(*BODY, Forbidden, NotFound, Conflict),
        )
    ),
)
async def create_project(request: Request) -> Response[bytes]:
    body = await read_json(request, _create_project)
    made = await services_of(request).projects.create(
        caller_of(request), body.name, body.parent_id, msgspec.structs.asdict(body.quota)
    )
    about(request, made.project.project_id)
    return answer(_project(made), 201)


@get(
    "/projects/{project_id:str}",
    opt=documented(
        Operation(
            tag="projects",
            summary="A project with its limits and use",
            response=schemas.ProjectState,
            errors=(NotFound,),
        )
    ),
)
async def get_project_state(request: Request, project_id: FromPath[str]) -> Response[bytes]:
    found = await services_of(request).projects.get(caller_of(request), segment(project_id))
    return answer(_project(found))


@patch(
    "/projects/{project_id:str}",
    opt=documented(
        Operation(
            tag="projects",
            right="projects:admin",
            summary="Rename a project, or change its limits",
            description="Limits are set from above. What runs goes on; only new sandboxes are "
            "refused.",
            request=schemas.ChangeProject,
            response=schemas.ProjectState,
            errors=(*BODY, Forbidden, NotFound, Conflict),
        )
    ),
)
async def change_project(request: Request, project_id: FromPath[str]) -> Response[bytes]:
    body = await read_json(request, _change_project)
    quota = {
        name: value
        for name, value in msgspec.structs.asdict(body.quota).items()
        if value is not UNSET
    }
    changed = await services_of(request).projects.change(
        caller_of(request), segment(project_id), name=body.name, quota=quota
    )
    return answer(_project(changed))


@delete(
    "/projects/{project_id:str}",
    opt=documented(
        Operation(
            tag="projects",
            right="projects:admin",
            summary="Close a project",
            description="Its keys and tokens are refused from now on; its records stay.",
            status=204,
            errors=(Forbidden, NotFound, Conflict),
        )
    ),
)
async def close_project(request: Request, project_id: FromPath[str]) -> Response[None]:
    await services_of(request).projects.close(caller_of(request), segment(project_id))
    return no_content()


@get(
    "/roles",
    opt=documented(
        Operation(tag="principals", summary="What each role may do", response=schemas.RoleList)
    ),
)
async def list_roles(request: Request) -> Response[bytes]:
    return answer(schemas.RoleList(roles={name: sorted(held) for name, held in ROLES.items()}))


@get(
    "/principals",
    opt=documented(
        Operation(tag="principals", summary="List principals", response=schemas.PrincipalList)
    ),
)
async def list_principals(request: Request) -> Response[bytes]:
    found = await services_of(request).principals.list(caller_of(request))
    return answer(schemas.PrincipalList(principals=[_principal(one) for one in found]))


@post(
    "/principals",
    opt=documented(
        Operation(
            tag="principals",
            summary="Make a principal",
            description="It may do nothing until something is granted to it.",
            request=schemas.CreatePrincipal,
            response=schemas.Principal,
            status=201,
            errors=(*BODY, Forbidden, Conflict),
        )
    ),
)
async def create_principal(request: Request) -> Response[bytes]:
    body = await read_json(request, _create_principal)
    made = await services_of(request).principals.create(caller_of(request), body.kind, body.name)
    about(request, made.principal_id)
    return answer(_principal(made), 201)


@get(
    "/principals/{principal_id:str}",
    opt=documented(
        Operation(
            tag="principals",
            summary="A principal and what it is granted",
            response=schemas.PrincipalState,
            errors=(NotFound,),
        )
    ),
)
async def get_principal(request: Request, principal_id: FromPath[str]) -> Response[bytes]:
    found = await services_of(request).principals.get(caller_of(request), segment(principal_id))
    return answer(
        schemas.PrincipalState(
            **msgspec.structs.asdict(_principal(found.principal)),
            grants=[_grant(grant) for grant in found.grants],
        )
    )


@patch(
    "/principals/{principal_id:str}",
    status_code=204,
    opt=documented(
        Operation(
            tag="principals",
            summary="Switch a principal off or on",
            request=schemas.ChangePrincipal,
            status=204,
            errors=(*BODY, Forbidden, NotFound),
        )
    ),
)
async def change_principal(request: Request, principal_id: FromPath[str]) -> Response[None]:
    body = await read_json(request, _change_principal)
    await services_of(request).principals.set_disabled(
        caller_of(request), segment(principal_id), body.disabled
    )
    return no_content()


@delete(
    "/principals/{principal_id:str}",
    opt=documented(
        Operation(
            tag="principals",
            summary="Delete a principal",
            description="With its grants, keys and tokens.",
            status=204,
            errors=(Forbidden, NotFound),
        )
    ),
)
async def delete_principal(request: Request, principal_id: FromPath[str]) -> Response[None]:
    await services_of(request).principals.delete(caller_of(request), segment(principal_id))
    return no_content()


@put(
    "/principals/{principal_id:str}/grants/{project_id:str}",
    opt=documented(
        Operation(
            tag="principals",
            summary="Let a principal act in a project",
            description="And in those below it, in place of what it had there. Nobody grants "
            "rights that they do not have themselves.",
            request=schemas.PutGrant,
            response=schemas.Grant,
            errors=(*BODY, Forbidden, NotFound),
        )
    ),
)
async def put_grant(
    request: Request, principal_id: FromPath[str], project_id: FromPath[str]
) -> Response[bytes]:
    body = await read_json(request, _put_grant)
    made = await services_of(request).principals.grant(
        caller_of(request),
        segment(principal_id),
        segment(project_id),
        role=body.role,
        rights=body.rights,
    )
    return answer(_grant(made))


@delete(
    "/principals/{principal_id:str}/grants/{project_id:str}",
    opt=documented(
        Operation(
            tag="principals",
            summary="Take back what a principal may do in a project",
            status=204,
            errors=(Forbidden, NotFound),
        )
    ),
)
async def delete_grant(
    request: Request, principal_id: FromPath[str], project_id: FromPath[str]
) -> Response[None]:
    await services_of(request).principals.revoke(
        caller_of(request), segment(principal_id), segment(project_id)
    )
    return no_content()


@post(
    "/principals/{principal_id:str}/api-keys",
    opt=documented(
        Operation(
            tag="principals",
            summary="Make an API key of a principal",
            description="The key itself is in this answer only.",
            request=schemas.CreatePrincipalKey,
            response=NewApiKey,
            status=201,
            errors=(*BODY, Forbidden, NotFound),
        )
    ),
)
async def create_principal_key(request: Request, principal_id: FromPath[str]) -> Response[bytes]:
    body = await read_json(request, _create_key)
    key, secret = await services_of(request).principals.create_key(
        caller_of(request), segment(principal_id), body.name, body.project_id
    )
    about(request, f"{segment(principal_id)} {key.key_id}")
    return answer(NewApiKey(**msgspec.structs.asdict(key_of(key)), key=secret), 201)


@get(
    "/tokens",
    opt=documented(Operation(tag="tokens", summary="List tokens", response=schemas.TokenList)),
)
async def list_tokens(request: Request) -> Response[bytes]:
    found = await services_of(request).tokens.list(caller_of(request))
    return answer(schemas.TokenList(tokens=[_token(one) for one in found]))


@post(
    "/tokens",
    opt=documented(
        Operation(
            tag="tokens",
            summary="Make a token",
            description="A part of what the caller may do, for a while. Never worth more than its "
            "maker is when it is used. The token itself is in this answer only.",
            request=schemas.CreateToken,
            request_required=False,
            response=schemas.NewToken,
            status=201,
            errors=(*BODY, Forbidden, NotFound, SandboxNotFound),
        )
    ),
)
async def create_token(request: Request) -> Response[bytes]:
    body = await read_json(request, _create_token, empty=b"{}")
    token, secret = await services_of(request).tokens.create(
        caller_of(request),
        name=body.name,
        ttl_s=body.ttl_s,
        rights=body.rights,
        projects=body.projects,
        sandbox_id=body.sandbox_id,
    )
    about(request, " ".join(filter(None, (token.token_id, token.sandbox_id))))
    return answer(schemas.NewToken(**msgspec.structs.asdict(_token(token)), token=secret), 201)


@delete(
    "/tokens/{token_id:str}",
    opt=documented(
        Operation(
            tag="tokens",
            summary="Revoke a token",
            description="And all that were made with it.",
            status=204,
            errors=(InvalidRequest, NotFound),
        )
    ),
)
async def revoke_token(request: Request, token_id: FromPath[str]) -> Response[None]:
    await services_of(request).tokens.revoke(caller_of(request), segment(token_id))
    return no_content()


HANDLERS = [
    get_caller,
    list_projects,
    create_project,
    get_project_state,
    change_project,
    close_project,
    list_roles,
    list_principals,
    create_principal,
    get_principal,
    change_principal,
    delete_principal,
    put_grant,
    delete_grant,
    create_principal_key,
    list_tokens,
    create_token,
    revoke_token,
]
