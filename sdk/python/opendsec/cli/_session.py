# SPDX-License-Identifier: Apache-2.0
"""From parsed options to a client and to the arguments of ``create``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from opendsec import Client, InvalidRequest, NetworkPolicy, ReadyCheck, Sandbox, VmOptions
from opendsec._sync._connect import gone

from ._output import note, waiting

RETRIES_MAX = 4
"""About three seconds: enough for a restart of the server, and bearable for who waits."""


def client_of(args: argparse.Namespace, *, retries_max: int = RETRIES_MAX) -> Client:
    """A client for the server the user means."""
    return Client(base_url=args.url, retries_max=retries_max)


def look_at(client: Client, sandbox_id: str) -> Sandbox:
    """A sandbox to ask something of. Unlike ``client.connect`` it never resumes a paused one.

    Raises:
        SandboxNotFound: unknown, or ended.
    """
    record = client.info(sandbox_id)
    if record.ended:
        raise gone(record)
    return Sandbox(client, record, owns_client=False)


def awake(client: Client, sandbox_id: str) -> Sandbox:
    """A sandbox to work in; a paused one is resumed first, and people are told.

    Raises:
        SandboxNotFound: unknown, or ended.
    """
    with waiting("Connecting to the sandbox..."):
        sandbox = look_at(client, sandbox_id)
        if sandbox.record.state in ("starting", "running"):
            return sandbox
        note(f"The sandbox is {sandbox.record.state}; it is resumed.")
        sandbox.resume()
        return sandbox


def _text_of(name: str | None) -> str | None:
    """The content of a file, or of the standard input."""
    if name is None:
        return None
    if name == "-":
        return sys.stdin.read()
    try:
        return Path(name).read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidRequest(f"--user-data: cannot read {name}: {exc}") from exc


def creation_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``Client.create`` that were given."""
    network = None
    if args.no_network or args.allow or args.deny:
        network = NetworkPolicy(
            internet=not args.no_network, allow=tuple(args.allow), deny=tuple(args.deny)
        )
    vm = None
    if args.user_data is not None or args.firmware is not None:
        vm = VmOptions(user_data=_text_of(args.user_data), firmware=args.firmware)
    return {
        "template": args.from_snapshot or args.template,
        "cpu": args.cpu,
        "memory_mb": args.memory,
        "disk_mb": args.disk,
        "env": dict(args.env),
        "metadata": dict(args.metadata),
        "labels": args.label,
        "task_id": args.task,
        "timeout_s": args.timeout,
        "idle_timeout_s": args.idle_timeout,
        "on_timeout": args.on_timeout,
        "pause_mode": args.pause_mode,
        "auto_resume": args.auto_resume,
        "network": network,
        "backend": args.backend,
        "vm": vm,
        "image": args.image,
        "layers": args.layer,
        "start_image": args.start_image,
        "node_labels": dict(args.node_label),
        "ready": None if args.ready is None else ReadyCheck(**args.ready),
        "idempotency_key": args.idempotency_key,
    }
