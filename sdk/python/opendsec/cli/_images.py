# SPDX-License-Identifier: Apache-2.0
"""``image``: container images on the server."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from contextlib import AbstractContextManager

import msgspec

from opendsec import (
    Client,
    ImageInfo,
    ImagePull,
    InvalidRequest,
    OpendsecError,
    RegistryAuth,
    _limits,
)

from . import _exit
from ._output import age, beside, note, print_json, print_table, size, waiting
from ._remove import remove_each
from ._session import client_of

SHORT_DIGEST_CHARS = 12


def ls(args: argparse.Namespace) -> int:
    """List images."""
    with client_of(args) as client:
        found = client.images.list()
    if args.json:
        print_json(found)
    elif args.quiet:
        for image in found:
            print(image.digest)
    else:
        print_table(
            ["NAME", "DIGEST", "LAYERS", "SIZE", "AGE", "USED"], [_row(image) for image in found]
        )
    return _exit.OK


def _row(image: ImageInfo) -> list[str]:
    return [
        ", ".join(image.names) or "-",
        image.digest.removeprefix("sha256:")[:SHORT_DIGEST_CHARS],
        str(len(image.layers)),
        size(image.size_bytes),
        age(image.created_at),
        age(image.last_used_at),
    ]


def pull(args: argparse.Namespace) -> int:
    """Pull an image, and show people how far it is."""
    auth = _login(args)
    with client_of(args) as client, _watched(client, args.reference):
        image = client.images.pull(args.reference, auth=auth)
    if args.json:
        print_json(image)
    else:
        print(image.digest)
        note(f"{len(image.layers)} layers, {size(image.size_bytes)} on the server's disk.")
    return _exit.OK


def _watched(client: Client, reference: str) -> AbstractContextManager[None]:
    """Meanwhile one line for people, drawn anew: what the server says of the pull."""

    def show(done: threading.Event) -> None:
        while not done.wait(_limits.PULL_LOOK_INTERVAL_S):
            with contextlib.suppress(OpendsecError):
                for one in client.images.pulls():
                    if _means(one, reference):
                        sys.stderr.write(f"\r{_line(one)}\x1b[K")
                        sys.stderr.flush()

        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()

    return beside(show)


def _means(pull: ImagePull, reference: str) -> bool:
    """The server shows a reference whole: ``docker.io/library/alpine:latest``."""
    return pull.reference == reference or f"/{reference}" in f"/{pull.reference}"


def _line(pull: ImagePull) -> str:
    if not pull.layers:
        return f"Pulling {pull.reference}: asking the registry"
    return (
        f"Pulling {pull.reference}: {pull.layers_done} of {pull.layers} layers, "
        f"{size(pull.bytes_done)} of {size(pull.bytes_total)}"
    )


def inspect(args: argparse.Namespace) -> int:
    """Show an image. JSON in any case; people get it indented."""
    with client_of(args) as client:
        image = client.images.get(args.image)
    if args.json:
        print_json(image)
    else:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(image)).decode() + "\n")
    return _exit.OK


def rm(args: argparse.Namespace) -> int:
    """Remove images, as many as can be."""
    with client_of(args) as client:
        return remove_each(args, args.images, client.images.delete)


def prune(args: argparse.Namespace) -> int:
    """Remove what nothing uses."""
    with client_of(args) as client, waiting("Removing..."):
        report = client.images.prune(unused_for_s=args.unused_for)
    if args.json:
        print_json(report)
        return _exit.OK
    for digest in report.images:
        print(digest)
    note(f"{len(report.images)} images and {report.layers} layers removed: "
         f"{size(report.freed_bytes)}.")  # fmt: skip
    return _exit.OK


def push(args: argparse.Namespace) -> int:
    """Send an image to a registry."""
    auth = _login(args)
    with client_of(args) as client, waiting("Pushing..."):
        digest = client.images.push(args.image, args.reference, auth=auth)
    if args.json:
        print_json({"digest": digest})
    else:
        print(digest)
    return _exit.OK


def _login(args: argparse.Namespace) -> RegistryAuth | None:
    """A password on the command line could be read by every user of the machine."""
    if args.user is None and not args.password_stdin:
        return None
    if args.user is None or not args.password_stdin:
        raise InvalidRequest("--user and --password-stdin go together.")
    return RegistryAuth(username=args.user, password=sys.stdin.readline().rstrip("\n"))
