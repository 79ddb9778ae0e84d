# SPDX-License-Identifier: Apache-2.0
"""What people and programs read: tables, JSON, errors."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.table import Table

    from opendsec._errors import OpendsecError

SILENT_S = 2.0
"""What takes longer shows that it is alive."""

STATE_STYLES = {
    "running": "green",
    "paused": "yellow",
    "failed": "red",
    "ended": "dim",
}


def wants_colour(stream: TextIO) -> bool:
    """Colour is for terminals whose owner did not object (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def print_json(value: Any) -> None:
    """One JSON document on one line."""
    import msgspec

    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Rows under headings: drawn on a terminal, plain aligned text elsewhere."""
    if sys.stdout.isatty():
        from rich.console import Console

        Console(no_color=not wants_colour(sys.stdout)).print(_drawn(columns, rows))
        return
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    for row in [columns, *rows]:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(line.rstrip())


def _drawn(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column in ("ID", "PID", "TIME", "STATE", "BACKEND"))
    for row in rows:
        table.add_row(*(Text(cell, STATE_STYLES.get(cell, "")) for cell in row))
    return table


@contextmanager
def draw_table() -> Iterator[Callable[[Sequence[str], Sequence[Sequence[str]]], None]]:
    """On a terminal: what draws a table over the one before. As much as fits is shown; the last
    one stays."""
    from rich.console import Console
    from rich.live import Live

    console = Console(no_color=not wants_colour(sys.stdout))
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        yield lambda columns, rows: live.update(_drawn(columns, rows), refresh=True)


REMEDIES = {
    "unauthenticated": "Set OPENDSEC_API_KEY. On the server's machine: "
    'eval "$(sudo opendsec env)"',
    "not_configured": "Set OPENDSEC_API_URL and OPENDSEC_API_KEY, or give --url.",
    "forbidden": "Use a key or token that has the right, of the project that owns it "
    "(OPENDSEC_API_KEY). `opendsec token whoami` shows what yours may do.",
    "sandbox_not_found": "`opendsec ls -a` lists them. An ended one cannot be used again: create "
    "a new one.",
    "template_not_found": "`opendsec template ls` lists them; snapshots go by --from-snapshot.",
    "build_failed": "Mend the step and build again; `opendsec template logs NAME` shows the log.",
    "build_not_found": "`opendsec template inspect NAME` lists its builds.",
    "batch_not_found": "`opendsec batch ls` lists them.",
    "batch_cancelled": "Nothing was made for it. Ask for it in another batch.",
    "snapshot_not_found": "`opendsec snapshot ls` lists them.",
    "image_not_found": "Check the reference and its tag; `opendsec image ls` lists those here.",
    "image_in_use": "End or delete what uses it first.",
    "task_not_found": "`opendsec task ls` lists them. A task is made by its first sandbox.",
    "task_operation_not_found": "`opendsec task show TASK` names the newest.",
    "task_exists": "`opendsec task set` changes its limits; or use another id.",
    "task_ended": "Use another --task, or `opendsec task set --reopen TASK`.",
    "task_paused": "`opendsec task resume TASK` lets it run on.",
    "task_budget_reached": "`opendsec task set --sandboxes COUNT TASK` gives it a larger budget.",
    "action_not_found": "`opendsec trajectory show SANDBOX` lists them.",
    "action_mismatch": "Use another id for another action.",
    "action_unknown": "`opendsec trajectory resolve` asks the sandbox again, or states it.",
    "trajectory_not_found": "`opendsec trajectory ls` lists them.",
    "sandbox_ended": "Create a new one; `opendsec trajectory forward` brings it to the same place.",
    "sandbox_lost": "Create a new one; `opendsec trajectory forward` brings it to the same place.",
    "function_pool_not_found": "`opendsec fn pool ls` lists them; `opendsec fn pool set` makes "
    "one.",
    "function_pool_unusable": "Use a template with python3, and check --preload.",
    "function_timeout": "Give a longer --timeout, or make the function faster.",
    "function_out_of_memory": "Raise --memory of the call or of the pool.",
    "function_queue_full": "Wait for answers before sending more calls.",
    "registry_denied": "Give --user and --password-stdin, and check the image's name.",
    "registry_limited": "Wait, log in (--user), or have a mirror set up.",
    "registry_unavailable": "Check the registry's address and health, and try again.",
    "process_not_found": "`opendsec ps ID` lists the sandbox's processes.",
    "sandbox_state_conflict": "`opendsec info ID` shows its state; try again when it has changed.",
    "already_paused": "Nothing is to be done. `opendsec resume ID` lets it run on.",
    "sandbox_paused": "`opendsec resume ID` lets it run on, with its processes if the pause kept "
    "memory.",
    "idempotency_request_mismatch": "Use another --idempotency-key for other options.",
    "command_timeout": "Give a longer --timeout, or make the program faster.",
    "disk_full": "Remove files in the sandbox, or create it with a larger --disk.",
    "port_not_open": "Start the service in the sandbox first.",
    "payload_too_large": "Send less. File contents go by `opendsec cp`.",
    "quota_exceeded": "`opendsec kill` ends what you no longer need; else ask for a higher quota.",
    "node_full": "Try again when sandboxes have ended or were paused, or add memory or disk.",
    "sandbox_start_failed": "Try again. `sudo opendsec doctor` if it repeats.",
    "start_timeout": "Try again. `sudo opendsec doctor` if it repeats.",
    "agent_unresponsive": "Try again; if it repeats, `opendsec kill ID` and create a new one.",
    "snapshot_damaged": "`opendsec snapshot rm` it and take it again. A paused sandbox may come up "
    "from its disk: `opendsec resume --reboot ID`.",
    "snapshot_incompatible": "A paused sandbox can be started from its disk: "
    "`opendsec resume --reboot ID`.",
    "resume_failed": "Try again; if it repeats: `opendsec resume --reboot ID`.",
    "connection_failed": "Check the address and that the server runs: `opendsec doctor`.",
}
"""What to do, in the words of this command line instead of those of the API, by error code."""


PHRASES = (
    ("GET /v1/info lists", "`opendsec info` lists"),
    ("Ask for mode `filesystem`", "Give --mode filesystem"),
    ("Use pause_mode `full`, or leave auto_resume out", "Leave --pause-mode or --auto-resume out"),
)
"""The same for parts of remedies that the server makes for one failure."""


def remedy_of(error: OpendsecError) -> str:
    """What the user should do. A remedy made here for one failure is left as it is."""
    text = error.remediation
    if text == error.default_remediation or error.http_status is not None:
        text = REMEDIES.get(error.code, text)
    for api_words, ours in PHRASES:
        text = text.replace(api_words, ours)
    return text


def print_error(error: OpendsecError, *, as_json: bool) -> None:
    """What happened, what to do, and what to quote when asking for help."""
    if as_json:
        import msgspec

        sys.stderr.write(msgspec.json.encode({"error": error.to_dict()}).decode() + "\n")
        return
    red, dim, off = ("\x1b[31m", "\x1b[2m", "\x1b[0m") if wants_colour(sys.stderr) else ("",) * 3
    facts = [f"code {error.code}", f"fault {error.fault}"]
    if error.retryable:
        facts.append("retryable")
    if error.request_id:
        facts.append(f"request {error.request_id}")
    print(f"{red}opendsec: {error.message}{off}", file=sys.stderr)
    print(f"  {remedy_of(error)}", file=sys.stderr)
    print(f"  {dim}{', '.join(facts)}{off}", file=sys.stderr)


def note(text: str) -> None:
    """A remark for people; programs read standard output and do not see it."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


@contextmanager
def beside(show: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run ``show`` in a thread while the block runs, if people look. It ends on the event."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=show, args=(done,), name="opendsec-beside", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def waiting(text: str) -> AbstractContextManager[None]:
    """While the block takes longer than two seconds, say so to people and count the seconds."""

    def show(done: threading.Event) -> None:
        started = time.monotonic()
        pause_s = SILENT_S
        while not done.wait(pause_s):
            sys.stderr.write(f"\r{text} {time.monotonic() - started:.0f} s\x1b[K")
            sys.stderr.flush()
            pause_s = 1.0
        if pause_s != SILENT_S:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    return beside(show)


def age(moment: datetime | None) -> str:
    """How long ago, or how far ahead, in its largest unit."""
    if moment is None:
        return "-"
    return span(abs((datetime.now(UTC) - moment).total_seconds()))


def span(seconds: float) -> str:
    """A duration in its largest unit, such as ``5m``."""
    for unit, length_s in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length_s:
            return f"{int(seconds // length_s)}{unit}"
    return f"{int(seconds)}s"


def size(count_bytes: float) -> str:
    """A size in its largest binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count_bytes < 1024 or unit == "GiB":
            return f"{count_bytes:.0f} {unit}" if unit == "B" else f"{count_bytes:.1f} {unit}"
        count_bytes /= 1024
    raise AssertionError("unreachable")
