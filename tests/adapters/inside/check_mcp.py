# SPDX-License-Identifier: AGPL-3.0-only
"""``opendsec mcp``, as a client of the Model Context Protocol starts and uses it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters, stdio_client

from opendsec import Client as Opendsec

HELLO = {
    "protocolVersion": "2025-06-18",
    "capabilities": {},
    "clientInfo": {"name": "t", "version": "1"},
}
OPENDSEC = str(Path(sys.executable).parent / "opendsec")


@asynccontextmanager
async def started(*arguments: str) -> AsyncIterator[Client]:
    server = StdioServerParameters(
        command=OPENDSEC, args=["mcp", "--memory", "128m", *arguments], env=dict(os.environ)
    )
    async with Client(stdio_client(server)) as client:
        yield client


async def call(client: Client, tool: str, **arguments: Any) -> Any:
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content[0].text
    answer = result.structured_content
    return answer["result"] if set(answer) == {"result"} else answer


async def refused(client: Client, tool: str, **arguments: Any) -> str:
    result = await client.call_tool(tool, arguments)
    assert result.is_error, result.structured_content
    text: str = result.content[0].text
    return text


async def test_tools() -> None:
    async with started() as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == {
            "create_sandbox", "run_command", "write_file", "read_file", "list_files",
            "list_sandboxes", "kill_sandbox",
        }  # fmt: skip
        assert all(tool.description for tool in tools.values())
        sandbox_id = (await call(client, "create_sandbox"))["sandbox_id"]
        here = {"sandbox_id": sandbox_id}
        ran = await call(client, "run_command", **here, command="echo hi; id -un; exit 3")
        assert (ran["exit_code"], ran["stdout"]) == (3, "hi\nuser\n")
        ran = await call(
            client, "run_command", **here, command="id -un; cat", user="root", stdin="x"
        )
        assert ran["stdout"] == "root\nx"
        ran = await call(client, "run_command", **here, command="echo a; sleep 30", timeout_s=1)
        assert (ran["timed_out"], ran["exit_code"], ran["stdout"]) == (True, None, "a\n")
        ran = await call(
            client, "run_command", **here, command="head -c 200000 /dev/zero | tr '\\0' x"
        )
        assert (ran["truncated"], len(ran["stdout"])) == (True, 65536)
        path = await call(client, "write_file", **here, path="d/a.txt", content="y" * 70_000)
        assert path == "/home/user/d/a.txt"
        text = await call(client, "read_file", **here, path=path)
        assert text.endswith("[cut: read on at offset_bytes=65536]")
        rest = await call(client, "read_file", **here, path=path, offset_bytes=65536)
        assert rest == "y" * (70_000 - 65536)
        (entry,) = await call(client, "list_files", **here, path="d")
        assert (entry["path"], entry["size_bytes"]) == (path, 70_000)
        assert "does not exist" in await refused(client, "read_file", **here, path="/no/such")
        assert await call(client, "kill_sandbox", **here) is True
        assert "no sandbox" in await refused(client, "run_command", **here, command="true")


async def test_a_model_reaches_nothing_but_its_own() -> None:
    with Opendsec() as server, server.create(memory_mb=64) as other, server.create() as given:
        options = ("--max-sandboxes", "1", "--no-network", "--sandbox", given.sandbox_id)
        async with started(*options) as client:
            for sandbox_id in (other.sandbox_id, "", "../../etc", "i" + "0" * 19):
                assert "have no sandbox" in await refused(
                    client, "run_command", sandbox_id=sandbox_id, command="true"
                )
                assert "made no sandbox" in await refused(
                    client, "kill_sandbox", sandbox_id=sandbox_id
                )
            ran = await call(client, "run_command", sandbox_id=given.sandbox_id, command="echo g")
            assert ran["stdout"] == "g\n"
            assert "made no" in await refused(client, "kill_sandbox", sandbox_id=given.sandbox_id)
            assert "no internet" in await refused(client, "create_sandbox", internet=True)
            made = (await call(client, "create_sandbox"))["sandbox_id"]
            assert "the limit" in await refused(client, "create_sandbox")
            # One that has ended does not count.
            server.kill(made)
            assert "has ended" in await refused(
                client, "run_command", sandbox_id=made, command="true"
            )
            second = (await call(client, "create_sandbox"))["sandbox_id"]
            assert await refused(
                client, "run_command", sandbox_id=second, command="true", timeout_s=0
            )
        # The server has gone, and what it made with it; not what was there before.
        assert server.info(second).ended
        assert given.is_running()
        assert other.is_running()


def test_a_server_that_is_told_to_end_ends_what_it_made() -> None:
    process = subprocess.Popen(
        [OPENDSEC, "mcp", "--memory", "64m"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        for message in (
            {"id": 1, "method": "initialize", "params": HELLO},
            {"method": "notifications/initialized"},
            {
                "id": 2,
                "method": "tools/call",
                "params": {"name": "create_sandbox", "arguments": {}},
            },
        ):
            process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
            process.stdin.flush()
        answers = (json.loads(line) for line in process.stdout)
        made = next(answer for answer in answers if answer.get("id") == 2)
        sandbox_id = made["result"]["structuredContent"]["sandbox_id"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
        with Opendsec() as client:
            assert client.info(sandbox_id).ended
    finally:
        process.kill()
        process.wait()
