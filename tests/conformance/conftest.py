# SPDX-License-Identifier: AGPL-3.0-only
"""Runs every behaviour on every backend, and prints the table."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from opendsec import BackendInfo, Client, Sandbox
from opendsec_server.config import Config, ConfigError
from opendsec_server.node.vmm.firecracker.program import find_programs
from tests import leaks
from tests.harness import Server, new_server
from tests.vm.image import ensure_image, missing_programs

from .kit import OCI_DIR, REFUSED, Bench, Maker, until
from .outside import PRIVATE, Outside, open_outside
from .table import Cell, Table

COLUMNS = ("container", "microvm-qemu", "microvm-firecracker", "vm")
"""Backends of this project; a microVM's differ by the program behind it."""

HERE = Path(__file__).parent
TEST_TIMEOUT_S = 300
SLOW = "full machines boot for minutes where they are emulated; ask for them: --backend vm"
TABLE = pytest.StashKey[Table]()
CELL = "conformance-cell"
OFFERED: dict[str, str] = {}
"""Backends that a server of this run turned out not to have, with the reason."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the suite."""
    group = parser.getgroup("conformance")
    group.addoption(
        "--backend",
        action="append",
        dest="conformance_backends",
        help="backend to test, as the API names it, or with its program: microvm-qemu; repeatable",
    )
    group.addoption(
        "--template",
        dest="conformance_template",
        help="template or disk image to make sandboxes of; by default base, and for backends that "
        "boot disk images one that is built here",
    )
    group.addoption(
        "--server", dest="conformance_server", help="URL of a running server to test instead"
    )
    group.addoption("--api-key", dest="conformance_key", help="its key; else OPENDSEC_API_KEY")
    group.addoption("--conformance-json", help="file to write the table to, as JSON")
    group.addoption("--conformance-markdown", help="file to write the table to, as Markdown")


def pytest_configure(config: pytest.Config) -> None:
    """One table per run."""
    config.stash[TABLE] = Table()
    config.pluginmanager.register(_Reader(config.stash[TABLE]))


class _Reader:
    """Fills the table from reports, which may come from another process."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take over what a report says of a behaviour."""
        for name, value in report.user_properties:
            if name == CELL:
                cell = msgspec.convert(value, Cell)
                self._table.put(cell.section, cell.behaviour, cell.column, cell.outcome)
                if cell.behind is not None:
                    self._table.columns[cell.column] = cell.behind
                if cell.absent is not None:
                    self._table.absent[cell.column] = cell.absent


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every behaviour runs on every chosen backend."""
    if "bench" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("conformance_backends", None) or COLUMNS
        metafunc.parametrize("bench", list(chosen), indirect=True, scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them, and note what each is called in the table. One backend after the other: only one
    server runs at a time."""
    for item in items:
        if HERE not in Path(str(item.path)).parents or not isinstance(item, pytest.Function):
            continue
        item.add_marker(pytest.mark.e2e)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))
        callspec = getattr(item, "callspec", None)
        if callspec is not None and "bench" in callspec.params:
            behaviour = item.originalname.removeprefix("test_").replace("_", " ")
            section = (item.module.__doc__ or item.module.__name__).splitlines()[0].rstrip(".")
            item.user_properties.append(
                ("conformance", (section, behaviour, callspec.params["bench"]))
            )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say in the report what it means for the table."""
    report = yield
    properties: dict[str, Any] = dict(item.user_properties)
    if "conformance" in properties:
        section, behaviour, column = properties["conformance"]
        outcome = None
        if report.failed or report.skipped:
            outcome = report.outcome
        elif report.when == "call":
            bench = getattr(item, "funcargs", {}).get("bench")
            refused = bench is not None and REFUSED in dict(bench.notes)
            outcome = "refused" if refused else "passed"
        if outcome is not None:
            table = item.config.stash[TABLE]
            cell = Cell(
                section=section,
                behaviour=behaviour,
                column=column,
                outcome=outcome,
                behind=table.columns.get(column),
                absent=table.absent.get(column),
            )
            report.user_properties.append((CELL, msgspec.to_builtins(cell)))
    return report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Show the table, and write it where that was asked for."""
    table = config.stash[TABLE]
    if not table.sections:
        return
    terminalreporter.section("conformance: behaviour × backend")
    for line in table.as_text():
        terminalreporter.write_line(line)
    for option, text in (
        ("conformance_json", table.as_json()),
        ("conformance_markdown", table.as_markdown()),
    ):
        target = config.getoption(option, None)
        if target:
            Path(target).write_text(text + "\n")


# --- a server for each backend ------------------------------------------------


def _settings(column: str) -> dict[str, object]:
    backend, _, program = column.partition("-")
    settings: dict[str, object] = {"dns_servers": [PRIVATE], "image_import_dirs": [str(OCI_DIR)]}
    if backend in ("container", "microvm", "vm"):  # E2B's clients cannot name one
        settings["default_backend"] = backend
    if program:
        settings["vmm"] = program
    if backend == "microvm":
        settings["slots_ready"] = 8
    return settings


def _plainly_missing(column: str) -> str | None:
    """What can be seen without starting a server."""
    if column in OFFERED:
        return OFFERED[column]
    if column.endswith("-firecracker"):
        try:
            asyncio.run(find_programs(Config()))
        except ConfigError as exc:
            return str(exc)
    if column.endswith("-qemu"):
        named = os.environ.get("OPENDSEC_QEMU")
        if named is None and not any(
            shutil.which(f"qemu-system-{machine}") for machine in ("x86_64", "aarch64")
        ):
            return "no qemu-system program in PATH, and none named by OPENDSEC_QEMU"
    return None


@pytest.fixture(scope="session")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside | None]:
    """The internet's stand-in; None without root."""
    if os.geteuid() != 0:
        yield None
        return
    with open_outside(tmp_path_factory.mktemp("outside")) as far:
        yield far


def _bench(config: pytest.Config, column: str, client: Client, server: Server | None) -> Bench:
    table = config.stash[TABLE]
    name, _, program = column.partition("-")
    backends = client.server_info().backends
    chosen = config.getoption("conformance_backends", None)
    for info in backends:
        if info.capabilities.disk_images and info.accelerator == "tcg" and not chosen:
            OFFERED[info.name] = SLOW
    for info in backends:
        if info.name == name and (not program or (info.vmm or "").startswith(program)):
            words = [word for word in (info.vmm, info.accelerator) if word not in (None, "none")]
            table.columns[column] = ", ".join(str(word) for word in words) or "no VMM"
            if column in OFFERED:
                _absent(table, column, OFFERED[column])
            return Bench(column, name, info, client, server, _template(config, info, server))
    offers = ", ".join(f"{b.name} ({b.vmm})" if b.vmm else b.name for b in backends)
    _absent(table, column, f"the server offers only: {offers}")
    raise AssertionError("not reached")


def _template(config: pytest.Config, info: BackendInfo, server: Server | None) -> str:
    asked: str | None = config.getoption("conformance_template", None)
    if asked or not info.capabilities.disk_images or server is None:
        return asked or "base"
    missing = missing_programs()
    if missing:
        pytest.skip(f"a disk image cannot be built: {', '.join(missing)} not installed")
    image = ensure_image(lambda line: print(f"disk image: {line}", flush=True))
    server.opendsecd("image", "import", "conformance", str(image.qcow2))
    with Client(base_url=server.url, api_key=server.api_key) as client:
        until(
            lambda: any(one.name == "conformance" for one in client.templates()),
            "the disk image is not registered",
        )
    return "conformance"


def _absent(table: Table, column: str, why: str) -> None:
    OFFERED[column] = table.absent[column] = why
    table.columns.setdefault(column, "absent")
    pytest.skip(f"{column}: {why}")


@pytest.fixture(scope="session")
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """One backend. At the end, nothing of its server may be left on the machine."""
    column: str = request.param
    table = request.config.stash[TABLE]
    url = request.config.getoption("conformance_server", None)
    if url:
        key = request.config.getoption("conformance_key", None)
        with Client(base_url=url, api_key=key) as client:
            yield _bench(request.config, column, client, None)
        return
    if os.geteuid() != 0:
        _absent(table, column, "a server of our own needs root; or give --server URL")
    missing = _plainly_missing(column)
    if missing:
        _absent(table, column, missing)
    request.getfixturevalue("outside")
    number = COLUMNS.index(column) if column in COLUMNS else len(COLUMNS)
    server = new_server(f"cf{number}", f"10.{200 + number}.0.0/16", **_settings(column))
    before = leaks.Snapshot.take(f"cf{number}", (server.root,))
    try:
        server.start()
        with Client(base_url=server.url, api_key=server.api_key) as client:
            yield _bench(request.config, column, client, server)
        server.stop()
        server.start()
        _assert_no_remains(server, mapped_too=True)
    finally:
        server.purge()
    before.assert_nothing_new()


def _assert_no_remains(server: Server, *, mapped_too: bool) -> None:
    end = time.monotonic() + leaks.GONE_WITHIN_S
    while left := leaks.remains_of_sandboxes(server.config, mapped_too=mapped_too):
        assert time.monotonic() < end, "left behind:\n  " + "\n  ".join(left)
        time.sleep(0.1)


# --- sandboxes ------------------------------------------------------------------


@pytest.fixture
def make(bench: Bench) -> Iterator[Maker]:
    """Makes sandboxes that are gone after the test."""
    maker = Maker(bench)
    yield maker
    maker.clean()


@pytest.fixture(scope="module")
def sandbox(bench: Bench) -> Iterator[Sandbox]:
    """One that the behaviours of a module share; none of them may end or pause it."""
    maker = Maker(bench)
    yield maker(env={"OF_SANDBOX": "1"})
    maker.clean()


@pytest.fixture(autouse=True)
def notes(bench: Bench) -> None:
    """What a test says of itself goes into the table; each starts with nothing."""
    bench.notes.clear()


@pytest.fixture(scope="module", autouse=True)
def leaves_nothing(bench: Bench) -> Iterator[None]:
    """After each group of behaviours, nothing of any sandbox is on the machine."""
    yield
    if bench.server is None:
        return
    assert [info.sandbox_id for info in bench.client.list()] == []
    _assert_no_remains(bench.server, mapped_too=False)
