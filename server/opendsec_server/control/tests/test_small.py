# SPDX-License-Identifier: AGPL-3.0-only
"""Tokens, keys, templates, invalidations, readiness."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from opendsec_server.config import Config, ConfigError
from opendsec_server.contract.errors import (
    Conflict,
    NodeUnavailable,
    NotFound,
    NotSupported,
    Unauthenticated,
)
from opendsec_server.control import invalidations as invalidations_module
from opendsec_server.control.iam import Caller
from opendsec_server.control.iam.service import KEY_RE
from opendsec_server.control.invalidations import Invalidation, Invalidations
from opendsec_server.control.services import Services
from opendsec_server.control.templates import TemplateDefinition
from opendsec_server.control.tokens import TokenMint, load_secret

from .conftest import first_caller
from .fake_node import FakeNode
from .store_faults import broken_store


def test_secret_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    secret = load_secret(path)
    assert load_secret(path) == secret
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="damaged"):
        load_secret(path)
    assert path.read_bytes() == b"short"


def test_tokens_differ_by_purpose_sandbox_and_secret() -> None:
    one, two = TokenMint(b"1" * 32), TokenMint(b"2" * 32)
    tokens = {
        f(name) for m in (one, two) for f in (m.access, m.traffic, m.control) for name in "ab"
    }
    assert len(tokens) == 12
    assert one.access("a") == TokenMint(b"1" * 32).access("a")


async def test_first_key_is_made_once(tmp_path: Path, node: FakeNode) -> None:
    config = Config(state_dir=str(tmp_path))
    services = await Services.start(config, node)
    text = config.api_key_file.read_text()
    assert KEY_RE.fullmatch(text.strip())
    assert config.api_key_file.stat().st_mode & 0o777 == 0o600
    await services.stop()
    (config.state_path / "store.db").unlink()
    services = await Services.start(config, node)
    assert config.api_key_file.read_text() == text, "an emptied store takes the old key again"
    await first_caller(services)
    await services.stop()


async def test_keys_are_hashed_and_scoped(services: Services, caller: Caller) -> None:
    key, secret = await services.iam.create_key(caller, "ci")
    raw = (services.config.state_path / "store.db-wal").read_bytes()
    assert secret.encode() not in raw
    again = await services.iam.authenticate(secret)
    assert again.project_id == caller.project_id
    await services.iam.delete_key(caller, key.key_id)
    with pytest.raises(Unauthenticated):
        await services.iam.authenticate(secret)
    with pytest.raises(NotFound):
        await services.iam.delete_key(caller, key.key_id)
    with pytest.raises(Conflict):
        await services.iam.delete_key(caller, caller.key_id)


@pytest.mark.parametrize("key", [None, "", "e2b_", "e2b_" + "0" * 40, "x" * 10_000, "é"])
async def test_bad_keys(services: Services, key: str | None) -> None:
    with pytest.raises(Unauthenticated):
        await services.iam.authenticate(key)


async def test_known_keys_are_believed_while_the_store_is_down(
    services: Services, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opendsec_server.control.iam.service.CACHE_TTL_S", 0.0)
    with broken_store(services):
        assert (await first_caller(services)).project_id == caller.project_id


async def test_templates(services: Services, caller: Caller) -> None:
    base = await services.templates.resolve(caller, "base")
    for reference in ("base:default", base.template_id):
        assert await services.templates.resolve(caller, reference) == base
    renewed = await services.templates.register(
        TemplateDefinition(name="base", image="base", cpu=4.0)
    )
    assert (renewed.template_id, renewed.cpu) == (base.template_id, 4.0)
    assert (await services.templates.resolve(caller, "base")).cpu == 4.0
    await services.templates.register(TemplateDefinition(name="other", image="other"))
    assert [t.name for t in await services.templates.visible(caller)] == ["base", "other"]


async def test_invalidations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invalidations_module, "BACKLOG_MAX", 2)
    published = Invalidations()
    lines = published.subscribe()
    assert (await anext(lines)).event == "hello"
    published.publish("a")
    published.publish("a")
    published.publish("b")
    assert [(await anext(lines)).sandbox_id for _ in range(2)] == ["a", "b"]
    for name in ("a", "b", "c", "d"):
        published.publish(name)
    assert await anext(lines) == Invalidation(event="invalidate_all")
    monkeypatch.setattr(invalidations_module, "PING_INTERVAL_S", 0.01)
    assert (await anext(lines)).event == "ping"
    published.close()
    assert [line async for line in lines] == []


async def test_kill_invalidates(services: Services, node: FakeNode, caller: Caller) -> None:
    from opendsec_server.control.params import CreateParams

    lines = services.invalidations.subscribe()
    await anext(lines)
    name = (await services.creates.create(caller, CreateParams())).record.sandbox_id
    await services.lifecycle.kill(caller, name)
    async with asyncio.timeout(5):
        async for line in lines:
            if line == Invalidation(event="invalidate", sandbox_id=name):
                break
    await lines.aclose()  # type: ignore[attr-defined]


async def test_readiness(config: Config, node: FakeNode) -> None:
    async def images() -> None:
        raise NotSupported("the base image is being built")

    services = await Services.start(config, node, ready_checks={"images": images})
    assert await services.not_ready() == ["images: the base image is being built"]
    node.unreachable = NodeUnavailable("away")
    with broken_store(services):
        reasons = await services.not_ready()
        assert b"opendsec_store_up 0.0" in await services.render_metrics()
    assert [reason.split(":")[0] for reason in reasons] == ["store", "node", "images"]
    await services.stop()
