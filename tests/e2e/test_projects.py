# SPDX-License-Identifier: AGPL-3.0-only
"""Projects, tokens and the audit log of a real server, over its death; through SDK, command line
and the published E2B client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2b import Sandbox as E2bSandbox

from opendsec import (
    Client,
    Forbidden,
    PrincipalInfo,
    Quota,
    QuotaExceeded,
    Sandbox,
    SandboxNotFound,
    Unauthenticated,
)
from opendsec.cli.main import main as command_line
from tests.harness import Server
from tests.servers import running_server

SMALL = {"backend": "container", "memory_mb": 64, "disk_mb": 64, "cpu": 0.5}


@pytest.fixture(scope="module")
def own_server() -> Iterator[Server]:
    """Its limits are its tests' own, and it is killed."""
    with running_server("iam", "10.221.0.0/16", slots_ready=2) as server:
        yield server


@pytest.fixture
def client(own_server: Server) -> Iterator[Client]:
    with Client(base_url=own_server.url, api_key=own_server.api_key) as opened:
        yield opened


def client_in(server: Server, key: str | None, project_id: str | None = None) -> Client:
    return Client(base_url=server.url, api_key=key, project_id=project_id, retries_max=0)


def small(client: Client) -> Sandbox:
    return client.create(**SMALL)  # type: ignore[arg-type]


def test_two_projects_over_the_death_of_the_server(own_server: Server, client: Client) -> None:
    team = client.projects.create("team", quota=Quota(sandboxes=2, memory_mb=1_024))
    one = client.projects.create("one", parent_id=team.project_id, quota=Quota(sandboxes=1))
    two = client.projects.create("two", parent_id=team.project_id)
    keys = {}
    for project in (one, two):
        with client_in(own_server, own_server.api_key, project.project_id) as inside:
            keys[project.name] = inside.api_keys.create("k").key
    with (
        client_in(own_server, keys["one"]) as in_one,
        client_in(own_server, keys["two"]) as in_two,
    ):
        first, second = small(in_one), small(in_two)
        assert first.exec("echo a").stdout == "a\n"
        with pytest.raises(QuotaExceeded, match="project `one`") as full:
            small(in_one)
        assert full.value.details["limit"] == 1
        with pytest.raises(QuotaExceeded, match="project `team`"):
            small(in_two)
        with pytest.raises(SandboxNotFound):
            in_two.info(first.sandbox_id)
        assert not in_two.kill(first.sandbox_id)
        foreign = client_in(own_server, keys["two"], one.project_id)
        with foreign, pytest.raises(Forbidden):
            foreign.info(first.sandbox_id)
        own_server.kill_daemon()
        own_server.start()
        assert client.projects.get(team.project_id).use.sandboxes == 2
        with pytest.raises(QuotaExceeded, match="project `team`"):
            small(in_two)
        first.pause()
        assert client.projects.get(team.project_id).use.sandboxes == 1
        third = small(in_two)
        with pytest.raises(QuotaExceeded, match="project `team`"):
            first.resume()
        third.kill()
        first.resume()
        assert first.exec("echo b").stdout == "b\n"
        for sandbox in (first, second):
            sandbox.kill()
        for project in (one, two, team):
            client.projects.close(project.project_id)
        with pytest.raises(Forbidden):
            in_one.projects.list()
    verdict = client.audit.verify()
    assert verdict.ok, verdict.fault
    killed = list(client.audit.entries(object=first.sandbox_id))
    assert {entry.project_id for entry in killed} == {one.project_id, two.project_id}
    assert {entry.outcome for entry in killed} >= {"ok", "sandbox_not_found", "quota_exceeded"}


def test_a_token_for_one_sandbox_runs_commands_in_it(own_server: Server, client: Client) -> None:
    mine, other = small(client), small(client)
    try:
        token = client.tokens.create(sandbox_id=mine.sandbox_id, ttl_s=600).token
        assert token is not None
        with client_in(own_server, token) as held:
            assert held.connect(mine.sandbox_id).exec("echo in").stdout == "in\n"
            for refused in (
                lambda: held.connect(other.sandbox_id),
                lambda: small(held),
                lambda: held.kill(mine.sandbox_id),
                lambda: list(held.list()),
            ):
                with pytest.raises(Forbidden):
                    refused()
        # E2B's client takes it for a key.
        theirs = E2bSandbox.connect(
            mine.sandbox_id,
            api_key=token,
            api_url=own_server.url,
            sandbox_url=own_server.url,
        )
        assert theirs.commands.run("echo e2b").stdout == "e2b\n"
        assert client.tokens.revoke(client.tokens.list()[0].token_id)
        with client_in(own_server, token) as gone, pytest.raises(Unauthenticated):
            gone.connect(mine.sandbox_id)
    finally:
        mine.kill()
        other.kill()


def test_the_command_line(
    own_server: Server,
    client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OPENDSEC_API_URL", own_server.url)

    def run(*words: str, fails: bool = False, key: str = own_server.api_key) -> str:
        monkeypatch.setenv("OPENDSEC_API_KEY", key)
        code = command_line(words)
        captured = capsys.readouterr()
        assert (code != 0) is fails, (words, captured)
        return (captured.err if fails else captured.out).strip()

    project = run("project", "create", "cli", "--sandboxes", "3", "--memory", "512")
    assert "3" in run("project", "show", project)
    run("project", "set", project, "--sandboxes", "none", "--cpu", "1.5")
    assert client.projects.get(project).quota == Quota(memory_mb=512, cpu=1.5)
    assert "cli" in run("project", "ls")
    principal = run("principal", "create", "ada", "--kind", "person")
    run("principal", "grant", principal, "--project", project, "--role", "viewer")
    key = run("principal", "key", principal)
    assert "viewer" in run("principal", "show", principal)
    assert f"({project})" in run("token", "whoami", key=key)
    assert "sandboxes:write" in run("create", fails=True, key=key)
    run("principal", "disable", principal)
    run("token", "whoami", fails=True, key=key)
    shown = json.loads(run("principal", "show", principal, "--json"))
    assert PrincipalInfo(**{**shown, "grants": ()}).disabled
    run("principal", "rm", principal)
    token = run("token", "create", "--ttl", "60", "--right", "sandboxes:read")
    run("ls", key=token)
    assert "sandboxes:read" in run("token", "ls")
    run("project", "close", project)
    assert "sandboxes:write" not in run("audit", "ls", "--limit", "5")
    export = tmp_path / "audit.jsonl"
    export.write_text(run("audit", "export") + "\n")
    assert "as they were written" in run("audit", "verify")
    assert "as they were written" in run("audit", "verify", "--file", str(export))
    lines = export.read_text().splitlines()
    changed = {**json.loads(lines[1]), "outcome": "ok", "actor_id": "nobody"}
    export.write_text("\n".join([lines[0], json.dumps(changed), *lines[2:]]) + "\n")
    assert "entry 2 was changed" in run("audit", "verify", "--file", str(export), fails=True)
    export.write_text("\n".join([lines[0], *lines[2:]]) + "\n")
    assert "entry 2 is missing" in run("audit", "verify", "--file", str(export), fails=True)
    export.write_text("precious notes\n")
    assert "no export" in run("audit", "verify", "--file", str(export), fails=True)


def test_the_log_is_checked_without_the_server(own_server: Server) -> None:
    """By root, on the machine, also when the server is down."""
    own_server.stop()
    assert "as they were written" in own_server.opendsecd("audit", "verify").stdout
    head = own_server.config.state_path / "audit.head"
    assert head.stat().st_mode & 0o777 == 0o600
    kept = head.read_bytes()
    head.write_bytes(json.dumps({"seq": 10**6, "hash": "0" * 64}).encode())
    cut = own_server.opendsecd("audit", "verify", check=False)
    assert cut.returncode != 0
    assert "are missing" in cut.stderr
    head.write_bytes(kept)
    own_server.start()
