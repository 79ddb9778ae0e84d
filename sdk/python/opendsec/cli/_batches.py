# SPDX-License-Identifier: Apache-2.0
"""``batch``: many sandboxes in one call, and one thing done to many."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from opendsec import Batch, BatchInfo, BatchItem, BulkOutcome, OpendsecError

from . import _exit
from ._output import age, note, print_error, print_json, print_table
from ._session import client_of, creation_arguments

COLUMNS = ["ID", "STATE", "ASKED", "MADE", "FAILED", "STARTING", "WAITING", "AGE"]


def create(args: argparse.Namespace) -> int:
    """Ask for many sandboxes; print the id of each."""
    if (args.count is None) == (args.items is None):
        raise _exit.Refused("give either COUNT or --items")
    options = creation_arguments(args)
    key = options.pop("idempotency_key")
    items = None if args.items is None else list(_items(args.items))
    with client_of(args) as client:
        batch = client.batches.create(
            args.count, items=items, wait_s=args.wait, idempotency_key=key, **options
        )
        if args.detach:
            _print_batch(args, batch.info)
            return _exit.OK
        note(f"batch {batch.batch_id}")
        return _show(args, batch, 0)


def watch(args: argparse.Namespace) -> int:
    """Print a batch's outcomes, those that are there and those that come."""
    with client_of(args) as client:
        return _show(args, client.batches.get(args.batch), args.after)


def _show(args: argparse.Namespace, batch: Batch, after: int) -> int:
    """Each sandbox's id on a line; errors are counted and told at the end."""
    failed: Counter[str] = Counter()
    examples: dict[str, OpendsecError] = {}
    code = _exit.OK
    # Ids on the same terminal would run into the bar.
    bar = not sys.stdout.isatty()
    for item in batch.results(after=after, progress=bar):
        if item.error is not None:
            failed[item.error.code] += 1
            examples.setdefault(item.error.code, item.error)
            code = max(code, _exit.code_for(item.error, runs_program=False))
        if args.json:
            print_json(_plain(item))
        elif item.sandbox is not None:
            print(item.sandbox.sandbox_id)
    for name, count in failed.items():
        if not args.json:
            print(f"opendsec: {count} of {batch.info.asked} were not made:", file=sys.stderr)
            print_error(examples[name], as_json=False)
    return code


def _plain(item: BatchItem) -> dict[str, Any]:
    plain: dict[str, Any] = {"index": item.index, "seq": item.seq}
    if item.sandbox is not None:
        plain["sandbox"] = item.sandbox.record
    if item.error is not None:
        plain["error"] = item.error.to_dict()
    return plain


def _items(name: str) -> Iterator[Any]:
    lines = sys.stdin if name == "-" else Path(name).read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError as exc:
            raise _exit.Refused(f"--items: line {number} is no JSON object: {exc}") from exc


def ls(args: argparse.Namespace) -> int:
    """List batches."""
    with client_of(args) as client:
        found = list(client.batches.list(limit=args.limit))
    if args.json:
        print_json(found)
    elif args.quiet:
        for batch in found:
            print(batch.batch_id)
    else:
        print_table(COLUMNS, [_row(batch) for batch in found])
    return _exit.OK


def status(args: argparse.Namespace) -> int:
    """Show one batch."""
    with client_of(args) as client:
        info = client.batches.get(args.batch).info
    if args.json:
        print_json(info)
    else:
        print_table(COLUMNS, [_row(info)])
    return _exit.OK


def cancel(args: argparse.Namespace) -> int:
    """Let no more of a batch begin."""
    with client_of(args) as client:
        info = client.batches.get(args.batch).cancel()
    _print_batch(args, info)
    if info.made + info.starting:
        note(f"`opendsec batch kill --batch {info.batch_id}` ends what was made.")
    return _exit.OK


def exec_(args: argparse.Namespace) -> int:
    """Run a command in many sandboxes; 1 if it failed in any."""
    if not args.program:
        raise _exit.Refused("give a program to run, after --")
    with client_of(args) as client:
        outcomes = client.batches.exec(
            shlex.join(args.program),
            user=args.user,
            workdir=args.workdir,
            env=dict(args.env),
            timeout_s=args.timeout,
            output_bytes=args.output_bytes,
            concurrency=args.concurrency,
            **_selection(args),
        )
        return _tell(args, outcomes)


def kill(args: argparse.Namespace) -> int:
    """End many sandboxes."""
    with client_of(args) as client:
        return _tell(args, client.batches.kill(**_selection(args)))


def timeout(args: argparse.Namespace) -> int:
    """Set when many sandboxes end."""
    with client_of(args) as client:
        return _tell(args, client.batches.set_timeout(args.seconds, **_selection(args)))


def _tell(args: argparse.Namespace, outcomes: Iterable[BulkOutcome]) -> int:
    """What became of each; the worst exit status."""
    code = _exit.OK
    for outcome in outcomes:
        if outcome.error is not None:
            code = max(code, _exit.code_for(outcome.error, runs_program=False))
        elif not outcome.ok:
            code = max(code, _exit.USER)
        if args.json:
            error = None if outcome.error is None else outcome.error.to_dict()
            plain = {"state": outcome.state, "result": outcome.result, "error": error}
            told = {name: value for name, value in plain.items() if value is not None}
            print_json({"sandbox_id": outcome.sandbox_id, **told})
        elif outcome.error is not None:
            print(f"opendsec: {outcome.sandbox_id}: {outcome.error.message}", file=sys.stderr)
        elif outcome.result is None:
            print(outcome.sandbox_id)
        else:
            _print_result(outcome)
    return code


def _print_result(outcome: BulkOutcome) -> None:
    result = outcome.result
    assert result is not None
    for text, cut, stream in (
        (result.stdout, result.stdout_cut, sys.stdout),
        (result.stderr, result.stderr_cut, sys.stderr),
    ):
        for line in text.splitlines():
            print(f"{outcome.sandbox_id}: {line}", file=stream)
        if cut:
            print(f"{outcome.sandbox_id}: (there was more output)", file=sys.stderr)
    if result.timed_out:
        print(f"{outcome.sandbox_id}: its time was over", file=sys.stderr)
    elif not result.ok:
        print(f"{outcome.sandbox_id}: exit code {result.exit_code}", file=sys.stderr)


def _selection(args: argparse.Namespace) -> dict[str, Any]:
    ids: list[str] = []
    for name in args.id:
        ids += sys.stdin.read().split() if name == "-" else [name]
    select: dict[str, Any] = {"task_id": args.task, "labels": args.label, "batch_id": args.batch}
    if args.id:
        select["ids"] = ids
    return select


def _print_batch(args: argparse.Namespace, info: BatchInfo) -> None:
    if args.json:
        print_json(info)
    else:
        print(info.batch_id)


def _row(info: BatchInfo) -> list[str]:
    counts = (info.asked, info.made, info.failed, info.starting, info.waiting)
    return [info.batch_id, info.state, *map(str, counts), age(info.created_at)]
