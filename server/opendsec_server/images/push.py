# SPDX-License-Identifier: AGPL-3.0-only
"""Images of this node as OCI images in a registry.

Each layer is mounted in a namespace of its own and packed as a tar with OCI's whiteouts. An image
that was pulled becomes one of the same content, not of the same bytes: the blobs it came as are
not kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from opendsec_server.config import Config
from opendsec_server.contract.errors import InvalidRequest, RegistryUnavailable
from opendsec_server.contract.images import RegistryAuth

from . import auth as credentials
from . import limits, manifests, registry, skopeo
from .children import layer_program
from .collapse import run_merged
from .references import Reference
from .registry import Endpoint, is_loopback
from .store import Image, ImageStore

_PACK = 'exec "$0" pack --from merged --gzip >"$1" 2>"$2"'


class Pusher:
    """Pushes images of a store."""

    def __init__(self, store: ImageStore, config: Config) -> None:
        self._store = store
        self._config = config
        self._packing = asyncio.Semaphore(2)

    async def push(self, image: Image, reference: Reference, auth: RegistryAuth | None) -> str:
        """Send an image; the digest of its manifest there.

        Raises:
            As ``contract.images.NodeImages.push``.
        """
        if reference.digest is not None or reference.tag is None:
            raise InvalidRequest("an image is pushed to a tag: HOST/NAME:TAG, without a digest")
        with self._store.holding() as hold, self._store.scratch("push") as scratch:
            await asyncio.to_thread(hold.add, image.layers)
            digest = await self._write_layout(image, scratch)
            await self._send(scratch, reference, auth)
        return digest

    async def _write_layout(self, image: Image, layout: Path) -> str:
        """An OCI layout (image-spec 1.1, image-layout) of the image; its manifest's digest."""
        blobs = layout / "blobs/sha256"
        blobs.mkdir(parents=True)
        packed = await asyncio.gather(
            *(self._pack(layer, blobs, layout / f"pack-{at}") for at, layer in
              enumerate(image.layers))
        )  # fmt: skip
        created = datetime.fromtimestamp(image.created_at, UTC).isoformat()
        config = manifests.from_config(image.config, [diff for diff, _part in packed], created)
        manifest = msgspec.json.encode(
            {
                "schemaVersion": 2,
                "mediaType": manifests.MANIFEST_TYPE,
                "config": _blob(blobs, config, manifests.CONFIG_TYPE),
                "layers": [part for _diff, part in packed],
            }
        )
        told = _blob(blobs, manifest, manifests.MANIFEST_TYPE)
        index = {"schemaVersion": 2, "manifests": [told]}
        (layout / "index.json").write_bytes(msgspec.json.encode(index))
        (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        return str(told["digest"])

    async def _pack(self, layer: str, blobs: Path, scratch: Path) -> tuple[str, dict[str, object]]:
        async with self._packing:
            await asyncio.to_thread(scratch.mkdir)
            tar, report = scratch / "tar", scratch / "report"
            await run_merged(
                [self._store.layer_path(layer)],
                scratch,
                ["sh", "-c", _PACK, layer_program(), str(tar), str(report)],
            )
        return await asyncio.to_thread(_taken, tar, report, blobs)

    async def _send(self, layout: Path, reference: Reference, auth: RegistryAuth | None) -> None:
        host = reference.host
        endpoint = Endpoint(host, is_loopback(host) or host in self._config.insecure_registries)
        node_file = credentials.auth_file_of(self._config.registry_auth_file)
        with credentials.for_skopeo(host, auth, node_file) as options:
            arguments = ["copy", *(f"--dest-{a[2:]}" if a.startswith("--") else a for a in
                                   options.arguments)]  # fmt: skip
            if endpoint.insecure:
                arguments.append("--dest-tls-verify=false")
            arguments += [f"oci:{layout}", reference.at(host)]
            try:
                await skopeo.run(arguments, options.fds, layout, limits.PULL_TIMEOUT_S)
            except skopeo.SkopeoTimeout as exc:
                raise RegistryUnavailable(f"{reference}: {exc}") from exc
            except skopeo.SkopeoError as exc:
                known = credentials.known(host, auth, node_file)
                raise await registry.explain(
                    endpoint, reference, known, str(exc), push=True
                ) from exc


def _blob(blobs: Path, data: bytes, kind: str) -> dict[str, object]:
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}


def _taken(tar: Path, report: Path, blobs: Path) -> tuple[str, dict[str, object]]:
    """Move a packed layer to its place; its ``diff_id`` and its descriptor."""
    told = json.loads(report.read_text().splitlines()[-1])
    size = tar.stat().st_size
    tar.rename(blobs / told["blob"].removeprefix("sha256:"))
    part = {"mediaType": manifests.LAYER_TYPE, "digest": told["blob"], "size": size}
    return told["diff"], part
