# SPDX-License-Identifier: AGPL-3.0-only
"""``/v1/images``: list, pull, look at, remove, prune and push them."""

from __future__ import annotations

import msgspec
from litestar import Response, delete, get, post
from litestar.params import FromPath

from opendsec_server.api.http import (
    Request,
    about,
    about_many,
    answer,
    caller_of,
    no_content,
    read_json,
    segment,
    services_of,
)
from opendsec_server.contract.errors import (
    Forbidden,
    ImageDamaged,
    ImageInUse,
    ImageNotFound,
    NodeFull,
)

from . import image_schemas as schemas
from .convert import image_of
from .documented import BODY, REGISTRY, Operation, documented
from .schemas import Image
from .templates import auth_of

_NAMED = "By reference, name, digest, or a digest's first 12 characters at least (URL-encoded)."

_pull = msgspec.json.Decoder(schemas.PullImage)
_prune = msgspec.json.Decoder(schemas.PruneImages)
_push = msgspec.json.Decoder(schemas.PushImage)


@get(
    "/images",
    opt=documented(
        Operation(
            tag="images",
            summary="List images",
            description="Those that were pulled, by any project, and the project's own.",
            response=schemas.ImageList,
        )
    ),
)
async def list_images(request: Request) -> Response[bytes]:
    images = await services_of(request).images.list(caller_of(request))
    return answer(schemas.ImageList(images=[image_of(image) for image in images]))


@get(
    "/images/{image:str}",
    opt=documented(
        Operation(
            tag="images",
            summary="An image",
            description=_NAMED,
            response=Image,
            errors=(ImageNotFound,),
        )
    ),
)
async def get_image(request: Request, image: FromPath[str]) -> Response[bytes]:
    found = await services_of(request).images.get(caller_of(request), segment(image))
    return answer(image_of(found))


@post(
    "/images/pull",
    status_code=200,
    opt=documented(
        Operation(
            tag="images",
            summary="Pull an image",
            description="Answers when it is here, which may take minutes; how far it is says "
            "`GET /v1/image-pulls`. A second call for the same shares it, and it goes on when the "
            "caller goes away. Layers that are here are not sent again.",
            request=schemas.PullImage,
            response=Image,
            errors=(*BODY, Forbidden, ImageNotFound, *REGISTRY, ImageDamaged, NodeFull),
        )
    ),
)
async def pull_image(request: Request) -> Response[bytes]:
    body = await read_json(request, _pull)
    about(request, body.reference)
    image = await services_of(request).images.pull(
        caller_of(request),
        body.reference,
        auth=auth_of(body.registry_auth),
        refresh=body.refresh,
    )
    return answer(image_of(image))


@get(
    "/image-pulls",
    opt=documented(
        Operation(
            tag="images",
            summary="How far pulls are",
            description="The project's own that are at work now; the installation's first project "
            "sees all.",
            response=schemas.PullList,
        )
    ),
)
async def list_pulls(request: Request) -> Response[bytes]:
    pulls = await services_of(request).images.progress(caller_of(request))
    return answer(
        schemas.PullList(pulls=[schemas.Pull(**msgspec.structs.asdict(pull)) for pull in pulls])
    )


@delete(
    "/images/{image:str}",
    opt=documented(
        Operation(
            tag="images",
            summary="Remove an image",
            description=f"{_NAMED} By one of several names: only that name is taken away. What was "
            "pulled, only the installation's first project may remove.",
            status=204,
            errors=(ImageNotFound, ImageInUse, Forbidden),
        )
    ),
)
async def delete_image(request: Request, image: FromPath[str]) -> Response[None]:
    await services_of(request).images.remove(caller_of(request), segment(image))
    return no_content()


@post(
    "/images/prune",
    status_code=200,
    opt=documented(
        Operation(
            tag="images",
            summary="Remove the images that nothing uses",
            description="For the installation's first project. Images of sandboxes, snapshots and "
            "templates stay.",
            request=schemas.PruneImages,
            request_required=False,
            response=schemas.Pruned,
            errors=(*BODY, Forbidden),
        )
    ),
)
async def prune_images(request: Request) -> Response[bytes]:
    body = await read_json(request, _prune, empty=b"{}")
    report = await services_of(request).images.prune(
        caller_of(request), unused_for_s=body.unused_for_s
    )
    about_many(request, "images", report.images)
    return answer(
        schemas.Pruned(
            images=list(report.images), layers=report.layers, freed_bytes=report.freed_bytes
        )
    )


@post(
    "/images/{image:str}/push",
    status_code=200,
    opt=documented(
        Operation(
            tag="images",
            summary="Push an image to a registry",
            description=_NAMED,
            request=schemas.PushImage,
            response=schemas.PushedImage,
            errors=(*BODY, ImageNotFound, *REGISTRY),
        )
    ),
)
async def push_image(request: Request, image: FromPath[str]) -> Response[bytes]:
    body = await read_json(request, _push)
    about(request, segment(image), body.reference)
    digest = await services_of(request).images.push(
        caller_of(request), segment(image), body.reference, auth=auth_of(body.registry_auth)
    )
    return answer(schemas.PushedImage(digest=digest))


HANDLERS = [
    list_images,
    get_image,
    pull_image,
    list_pulls,
    delete_image,
    prune_images,
    push_image,
]
