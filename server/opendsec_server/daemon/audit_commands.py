# SPDX-License-Identifier: AGPL-3.0-only
"""``opendsecd audit``: the audit log, checked by root on the machine, with or without a server."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from opendsec_server.config import Config, ConfigError, load_config
from opendsec_server.contract.errors import OpendsecError

if TYPE_CHECKING:
    from opendsec_server.control.audit import Verdict

EX_CONFIG = 78
EX_CHANGED = 1

app = typer.Typer(help="The audit log.", no_args_is_help=True)

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Settings file. Default: /etc/opendsec/config.toml."),
]


@app.callback()
def _several() -> None:
    """Commands stand below the name, also while there is one."""


@app.command("verify")
def verify_log(config: ConfigOption = None) -> None:
    """Check that nothing in the log was changed, removed or added. Exit code 1 if it was."""
    if os.geteuid() != 0:
        _fail("run this as root: only root can see the server's files")
    try:
        verdict = asyncio.run(_verify(load_config(config)))
    except ConfigError as exc:
        _fail(str(exc))
    except OpendsecError as exc:
        _fail(exc.message)
    if not verdict.ok:
        _fail(f"the log is not as it was written: {verdict.fault}", EX_CHANGED)
    typer.echo(f"{verdict.entries} entries are as they were written; head {verdict.head_hash}")


async def _verify(config: Config) -> Verdict:
    from opendsec_server.control.audit import AUDIT_HEAD_FILE, verify
    from opendsec_server.control.tokens import TokenMint, load_secret
    from opendsec_server.store.store import Store

    if not (config.state_path / "secret").exists():
        raise ConfigError(f"no server was ever started with {config.state_path}")
    secret = TokenMint(load_secret(config.state_path / "secret")).audit_secret()
    store = await Store.open(config)
    try:
        return await verify(store, secret, config.state_path / AUDIT_HEAD_FILE)
    finally:
        await store.close()


def _fail(message: str, code: int = EX_CONFIG) -> NoReturn:
    typer.secho(f"opendsecd: {message}", err=True)
    raise typer.Exit(code)
