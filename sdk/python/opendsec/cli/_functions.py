# SPDX-License-Identifier: Apache-2.0
"""``fn``: calls of functions, and their pools."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from opendsec import CallResult, FunctionPool, InvalidRequest
from opendsec._fn_models import CallOptions
from opendsec._fn_values import encode
from opendsec._sync._functions import make_item

from . import _exit
from ._output import note, print_error, print_json, print_table
from ._remove import remove_each
from ._session import client_of


def run(args: argparse.Namespace) -> int:
    """Run a text; its output goes where output goes, then its value."""
    source = args.code if args.code is not None else _text(args.script)
    with client_of(args) as client:
        result = client.fn.run(
            source,
            entry=args.entry,
            args=[_json("--arg", text) for text in args.arg],
            files=dict(_file(text) for text in args.file),
            check=False,
            pool=args.pool,
            timeout_s=args.timeout,
            memory_mb=args.memory,
            collect=args.collect,
        )
    _write_files(result, Path(args.out))
    if args.json:
        print_json(_as_json(result))
    else:
        sys.stdout.write(result.stdout)
        sys.stderr.write(result.stderr)
        if result.error is None and (result.value is not None or args.entry is not None):
            print(_shown(result.value))
    if result.error is None:
        return _exit.OK
    if not args.json:
        trace = result.error.details.get("traceback")
        if trace:
            sys.stderr.write(str(trace))
        print_error(result.error, as_json=False)
    return _exit.code_for(result.error, runs_program=False)


def map_lines(args: argparse.Namespace) -> int:
    """A line of JSON in, a line of JSON out. The worst exit code of what failed."""
    code = {"source": _text(args.script), "entry": args.entry}
    options = CallOptions(pool=args.pool, timeout_s=args.timeout, memory_mb=args.memory)
    worst, failed, waiting, following = _exit.OK, 0, {}, 0
    with client_of(args) as client:
        items = (make_item(code, (value,), {}, None) for value in _lines())
        for result in client.fn.outcomes(code, items, options, retries=2):
            if result.error is not None:
                failed += 1
                worst = max(worst, _exit.code_for(result.error, runs_program=False))
            if args.unordered:
                print_json({"index": result.index, **_line(result)})
                continue
            waiting[result.index] = result
            while following in waiting:
                print_json(_line(waiting.pop(following)))
                following += 1
    if failed:
        note(f"{failed} calls failed.")
    return worst


def _line(result: CallResult) -> dict[str, Any]:
    if result.error is not None:
        return {"error": result.error.to_dict()}
    return {"value": encode(result.value)}


def _as_json(result: CallResult) -> dict[str, Any]:
    return {
        **_line(result),
        "stdout": result.stdout,
        "stderr": result.stderr,
        "files": sorted(result.files),
        "seconds": result.seconds,
        "cpu_seconds": result.cpu_seconds,
        "worker": result.worker,
    }


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _text(name: str) -> str:
    return sys.stdin.read() if name == "-" else Path(name).read_text()


def _json(what: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        raise InvalidRequest(f"{what}: `{text[:80]}` is not JSON. Text needs quotes.") from None


def _lines() -> Iterator[Any]:
    for number, line in enumerate(sys.stdin, 1):
        if line.strip():
            yield _json(f"line {number}", line)


def _file(text: str) -> tuple[str, bytes]:
    local, colon, name = text.rpartition(":")
    if not colon:
        local, name = text, Path(text).name
    return name, Path(local).read_bytes()


def _write_files(result: CallResult, folder: Path) -> None:
    """The names come from the call: none may lead out of the folder, through no link either."""
    root = folder.resolve()
    for name, content in result.files.items():
        path = PurePosixPath(name)
        target = root / path
        if path.is_absolute() or ".." in path.parts or not target.resolve().is_relative_to(root):
            raise InvalidRequest(f"The call's file `{name[:80]}` would be written elsewhere.")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        note(f"{target}: {len(content)} bytes")


def pool_ls(args: argparse.Namespace) -> int:
    """List pools."""
    with client_of(args) as client:
        found = client.fn.pools.list()
    if args.json:
        print_json(found)
    else:
        print_table(
            ["POOL", "TEMPLATE", "PYTHON", "IDLE", "BUSY", "STARTING", "WAITING", "DONE"],
            [_row(pool) for pool in found],
        )
    return _exit.OK


def _row(pool: FunctionPool) -> list[str]:
    return [
        pool.name,
        pool.template,
        pool.python or "-",
        f"{pool.workers_idle}/{pool.workers_max}",
        str(pool.workers_busy),
        str(pool.workers_starting),
        str(pool.calls_waiting),
        str(pool.calls_finished),
    ]


def pool_show(args: argparse.Namespace) -> int:
    """Show a pool. JSON in any case; people get it indented."""
    with client_of(args) as client:
        return _show(args, client.fn.pools.get(args.pool))


def pool_set(args: argparse.Namespace) -> int:
    """Make or change a pool."""
    with client_of(args) as client:
        pool = client.fn.pools.put(
            args.pool,
            template=args.template,
            cpu=args.cpu,
            memory_mb=args.memory,
            disk_mb=args.disk,
            internet=not args.no_network,
            preload=args.preload,
            workers_max=args.workers,
            workers_min=args.keep,
            idle_s=args.idle,
        )
    return _show(args, pool)


def _show(args: argparse.Namespace, pool: FunctionPool) -> int:
    text = msgspec.json.encode(pool)
    if not args.json:
        text = msgspec.json.format(text)
    sys.stdout.write(text.decode() + "\n")
    return _exit.OK


def pool_rm(args: argparse.Namespace) -> int:
    """Delete pools, as many as can be."""
    with client_of(args) as client:
        return remove_each(args, args.pools, client.fn.pools.delete)
