# SPDX-License-Identifier: Apache-2.0
"""``pause``, ``resume``, ``fork`` and ``snapshot``."""

from __future__ import annotations

import argparse

from opendsec import OpendsecError, Snapshot, SnapshotNotFound

from . import _exit
from ._output import age, note, print_error, print_json, print_table, size, waiting
from ._remove import remove_each
from ._session import client_of


def pause(args: argparse.Namespace) -> int:
    """Pause a sandbox."""
    with client_of(args) as client, waiting("Pausing..."):
        report = client.pause(args.sandbox, mode=args.mode)
    if args.json:
        print_json(report)
        return _exit.OK
    print(report.sandbox.sandbox_id)
    note(
        f"Paused in {report.took_s:.1f} s: {size(report.memory_freed_bytes)} of "
        f"{size(report.memory_before_bytes)} memory freed, {size(report.stored_bytes)} stored."
    )
    return _exit.OK


def resume(args: argparse.Namespace) -> int:
    """Resume a sandbox."""
    with client_of(args) as client, waiting("Resuming..."):
        record = client.resume(args.sandbox, timeout_s=args.timeout, reboot=args.reboot)
    if args.json:
        print_json(record)
    else:
        print(record.sandbox_id)
    return _exit.OK


def pack(args: argparse.Namespace) -> int:
    """Make an image of a sandbox's changes."""
    with client_of(args) as client, waiting("Packing..."):
        image = client.pack(
            args.sandbox, name=args.name, squash=args.squash, scrub=not args.no_scrub
        )
    if args.json:
        print_json(image)
    else:
        print(image.digest)
        note(f"{len(image.layers)} layers, {size(image.size_bytes)} on the server's disk.")
    return _exit.OK


def fork(args: argparse.Namespace) -> int:
    """Fork a sandbox; the exit code is that of the worst child."""
    with client_of(args) as client, waiting("Forking..."):
        outcomes = client.fork(
            args.sandbox,
            args.count,
            mode=args.mode,
            timeout_s=args.timeout,
            # None, not an empty list: then they are as the original's.
            metadata=dict(args.metadata) or None,
            labels=args.label or None,
            idempotency_key=args.idempotency_key,
        )
    code = _exit.OK
    items: list[object] = []
    for outcome in outcomes:
        if isinstance(outcome, OpendsecError):
            code = max(code, _exit.code_for(outcome, runs_program=False))
            items.append({"error": outcome.to_dict()})
            if not args.json:
                print_error(outcome, as_json=False)
        else:
            items.append({"sandbox": outcome.record})
            if not args.json:
                print(outcome.sandbox_id)
    if args.json:
        print_json(items)
    return code


def snapshot_create(args: argparse.Namespace) -> int:
    """Take a snapshot."""
    with client_of(args) as client, waiting("Saving..."):
        made = client.snapshot(
            args.sandbox, name=args.name, mode=args.mode, idempotency_key=args.idempotency_key
        )
    if args.json:
        print_json(made)
    else:
        print(made.snapshot_id)
    return _exit.OK


def snapshot_ls(args: argparse.Namespace) -> int:
    """List snapshots."""
    with client_of(args) as client:
        found = list(
            client.snapshots.list(sandbox_id=args.sandbox, name=args.name, limit=args.limit)
        )
    if args.json:
        print_json(found)
    elif args.quiet:
        for snapshot in found:
            print(snapshot.snapshot_id)
    else:
        print_table(
            ["ID", "NAME", "BACKEND", "MODE", "DISK", "MEMORY", "AGE", "SOURCE"],
            [_row(snapshot) for snapshot in found],
        )
    return _exit.OK


def _row(snapshot: Snapshot) -> list[str]:
    return [
        snapshot.snapshot_id,
        ",".join(snapshot.names) or snapshot.name or "-",
        snapshot.backend or "-",
        snapshot.mode or "-",
        size(snapshot.disk_bytes),
        size(snapshot.memory_bytes),
        age(snapshot.created_at),
        snapshot.source_id or "-",
    ]


def snapshot_rm(args: argparse.Namespace) -> int:
    """Remove snapshots, as many as can be."""
    with client_of(args) as client:

        def remove(name: str) -> None:
            if not client.snapshots.delete(name):
                raise SnapshotNotFound(f"There is no snapshot {name}.")

        return remove_each(args, args.snapshots, remove)
