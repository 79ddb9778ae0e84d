# SPDX-License-Identifier: AGPL-3.0-only
"""A real registry on loopback, images to put into it, and a proxy that spoils what it passes on."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import http.server
import io
import json
import shutil
import socket
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from opendsec_server.images.manifests import architecture

USER, PASSWORD = "puller", "kept-from-every-log-7Qx"
_HTPASSWD = "puller:$2y$04$amjYoTOWtF5lqwz5tCcSV.l0vGUY/BfS.J4MxZvBsUHEoxeItmPrq\n"
_START_TIMEOUT_S = 20.0


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@dataclass
class Registry:
    """A running registry."""

    host: str
    root: Path
    auth: bool

    def push(self, layout: Path, name: str, *options: str) -> str:
        """Put an OCI layout into it, with more options of skopeo's copy; its reference."""
        reference = f"{self.host}/{name}"
        login = [f"--dest-creds={USER}:{PASSWORD}"] if self.auth else []
        subprocess.run(
            ["skopeo", "--insecure-policy", "copy", "--all", "--quiet", "--dest-tls-verify=false",
             *login, *options, f"oci:{layout}", f"docker://{reference}"],
            check=True,
            capture_output=True,
        )  # fmt: skip
        return reference

    def blob_path(self, digest: str) -> Path:
        """Where it keeps a blob."""
        digits = digest.removeprefix("sha256:")
        return self.root / f"docker/registry/v2/blobs/sha256/{digits[:2]}/{digits}/data"


@contextlib.contextmanager
def running_registry(root: Path, *, auth: bool = False) -> Iterator[Registry]:
    """Debian's ``docker-registry`` on a free port."""
    if shutil.which("docker-registry") is None:
        pytest.skip("the package docker-registry is not installed")
    root.mkdir(parents=True, exist_ok=True)
    host = f"127.0.0.1:{free_port()}"
    lines = [
        "version: 0.1", "log: {level: error}",
        f"storage: {{filesystem: {{rootdirectory: {root}}}, delete: {{enabled: true}}}}",
        f"http: {{addr: {host}}}",
    ]  # fmt: skip
    if auth:
        (root / "htpasswd").write_text(_HTPASSWD)
        lines.append(f"auth: {{htpasswd: {{realm: test, path: {root / 'htpasswd'}}}}}")
    (root / "config.yml").write_text("\n".join(lines) + "\n")
    with (root / "log").open("w") as log:
        process = subprocess.Popen(
            ["docker-registry", "serve", str(root / "config.yml")], stdout=log, stderr=log
        )
    try:
        _await_port(host, process)
        yield Registry(host, root, auth)
    finally:
        process.kill()
        process.wait()


def _await_port(host: str, process: subprocess.Popen[bytes]) -> None:
    name, _, port = host.partition(":")
    until = time.monotonic() + _START_TIMEOUT_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection((name, int(port)), 1):
            return
        assert process.poll() is None, "the registry ended"
        assert time.monotonic() < until, "the registry does not listen"
        time.sleep(0.05)


# --- images -------------------------------------------------------------------


@dataclass
class Entry:
    """One entry of a layer's tar."""

    name: str
    data: bytes = b""
    kind: bytes = tarfile.REGTYPE
    mode: int = 0o644
    uid: int = 0
    link: str = ""
    device: tuple[int, int] = (0, 0)
    headers: dict[str, str] = field(default_factory=dict)


def tar_of(entries: Sequence[Entry]) -> bytes:
    """A tar in the PAX format."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            info = tarfile.TarInfo(entry.name)
            info.type, info.mode, info.uid, info.mtime = entry.kind, entry.mode, entry.uid, 1000
            info.linkname, (info.devmajor, info.devminor) = entry.link, entry.device
            info.size = len(entry.data) if entry.kind == tarfile.REGTYPE else 0
            info.pax_headers = entry.headers
            tar.addfile(info, io.BytesIO(entry.data))
    return out.getvalue()


def files(**contents: str) -> bytes:
    """A tar of text files; ``_`` in a name stands for a slash."""
    return tar_of([Entry(name.replace("_", "/"), text.encode()) for name, text in contents.items()])


def sha256(data: bytes) -> str:
    """``sha256:…``."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _zstd(data: bytes) -> bytes:
    return subprocess.run(["zstd", "-q"], input=data, capture_output=True, check=True).stdout


_COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda data: gzip.compress(data, 1, mtime=0),
    "zstd": _zstd,
    "": lambda data: data,
}


def make_layout(
    path: Path,
    layers: Sequence[bytes],
    config: dict[str, Any] | None = None,
    *,
    arch: str | None = None,
    diff_ids: Sequence[str] | None = None,
    compress: Literal["gzip", "zstd", ""] = "gzip",
) -> str:
    """An OCI layout of one image; the digest of its manifest."""
    blobs = path / "blobs/sha256"
    blobs.mkdir(parents=True, exist_ok=True)

    def put(data: bytes, kind: str) -> dict[str, Any]:
        digest = sha256(data)
        (blobs / digest[7:]).write_bytes(data)
        return {"mediaType": kind, "digest": digest, "size": len(data)}

    kind = "application/vnd.oci.image.layer.v1.tar" + (f"+{compress}" if compress else "")
    parts = [put(_COMPRESS[compress](tar), kind) for tar in layers]
    whole = {
        "architecture": arch or architecture(),
        "os": "linux",
        "config": config or {},
        "rootfs": {
            "type": "layers",
            "diff_ids": list(diff_ids or [sha256(tar) for tar in layers]),
        },
    }
    told = put(json.dumps(whole).encode(), "application/vnd.oci.image.config.v1+json")
    kind = "application/vnd.oci.image.manifest.v1+json"
    manifest = {"schemaVersion": 2, "mediaType": kind, "config": told, "layers": parts}
    put_manifest = put(json.dumps(manifest).encode(), kind)
    (path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [put_manifest]}))
    (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return str(put_manifest["digest"])


def make_multi_layout(path: Path, variants: dict[str, Sequence[bytes]]) -> None:
    """An OCI layout of one image for several processors."""
    manifests = []
    for arch, layers in variants.items():
        digest = make_layout(path, layers, arch=arch)
        size = (path / "blobs/sha256" / digest[7:]).stat().st_size
        manifests.append(
            {
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "digest": digest,
                "size": size,
                "platform": {"architecture": arch, "os": "linux"},
            }
        )
    kind = "application/vnd.oci.image.index.v1+json"
    index = {"schemaVersion": 2, "mediaType": kind, "manifests": manifests}
    data = json.dumps(index).encode()
    (path / "blobs/sha256" / sha256(data)[7:]).write_bytes(data)
    told = {"mediaType": kind, "digest": sha256(data), "size": len(data)}
    (path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [told]}))


# --- faults -------------------------------------------------------------------


class Answer(http.server.BaseHTTPRequestHandler):
    """One request through the proxy."""

    server: FaultProxy
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Pass it on, or do what the proxy's fault says."""
        self.server.requests.append(f"{self.command} {self.path}")
        fault = self.server.fault
        if fault is not None and fault(self):
            return
        self.forward()

    do_HEAD = do_GET  # noqa: N815 (the base class's name)

    def forward(self, change: Callable[[bytes], bytes] | None = None) -> None:
        """Pass it on.

        Args:
            change: What becomes of the body; the headers stay as they are.
        """
        upstream = http.client.HTTPConnection(self.server.behind, timeout=30)
        # One by one: skopeo says in several headers of one name what it accepts.
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        upstream.putheader("Host", self.server.behind)
        for name, value in self.headers.items():
            if name.lower() != "host":
                upstream.putheader(name, value)
        upstream.endheaders()
        reply = upstream.getresponse()
        body = reply.read()
        self.send_response(reply.status)
        for name, value in reply.getheaders():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(OSError):
                self.wfile.write(body if change is None else change(body))
        if change is not None:
            self.close_connection = True
        upstream.close()

    def refuse(self, status: int, headers: dict[str, str] | None = None) -> bool:
        """Answer with a status instead."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()
        return True

    def log_message(self, *_arguments: object) -> None:
        """Not to the tests' output."""


class FaultProxy(http.server.ThreadingHTTPServer):
    """In front of a registry: passes requests on until it is told to do otherwise.

    Attributes:
        fault: Called with each request; True: it has answered.
        requests: Those it got, ``GET /v2/…``.
    """

    daemon_threads = True

    def __init__(self, behind: str) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.behind = behind
        self.fault: Callable[[Answer], bool] | None = None
        self.requests: list[str] = []

    @property
    def host(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.server_port}"

    def blobs(self) -> list[str]:
        """Digests of the blobs that were asked for."""
        return [r.rpartition("/")[2] for r in self.requests if r.startswith("GET") and "/blobs/" in
                r]  # fmt: skip


@contextlib.contextmanager
def fault_proxy(behind: str) -> Iterator[FaultProxy]:
    """A proxy that runs."""
    proxy = FaultProxy(behind)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()
