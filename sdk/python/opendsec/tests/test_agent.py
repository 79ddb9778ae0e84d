# SPDX-License-Identifier: Apache-2.0
"""The data half against the real guest agent."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from opendsec import (
    AlreadyExists,
    CommandTimeout,
    ConnectionFailed,
    FileNotFound,
    InvalidRequest,
    ProcessNotFound,
    SandboxNotFound,
    Unauthenticated,
    WaitTimeout,
)

from .conftest import Agent, running_agent
from .fake_server import SANDBOX_ID, Answer, FakeServer, sandbox
from .kits import Kit, close, collect, done, each, within

# --- commands ----------------------------------------------------------------------


async def test_exec(live: Any) -> None:
    result = await done(live.exec("echo out; echo err >&2; exit 3"))
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
    assert result.error is None
    argv = await done(live.exec(["printf", "%s|", "a b", "$HOME", "ä"]))
    assert argv.stdout == "a b|$HOME|ä|"


async def test_environment_and_directory(live: Any, tmp_path: Path) -> None:
    result = await done(live.exec('echo "$FROM_INIT $A"; pwd', env={"A": "ü x"}, cwd=str(tmp_path)))
    assert result.stdout == f"yes ü x\n{tmp_path}\n"


async def test_huge_environment(live: Any) -> None:
    big = "x" * 100_000
    result = await done(live.exec(["sh", "-c", 'printf %s "$BIG"'], env={"BIG": big}))
    assert result.stdout == big


async def test_ten_megabytes_of_output(live: Any) -> None:
    size = 10 * 1024 * 1024
    result = await done(live.exec(f"head -c {size} /dev/zero | tr '\\0' x"))
    assert (len(result.stdout_bytes), result.truncated) == (size, False)
    short = await done(live.exec(f"head -c {size} /dev/zero", output_limit_bytes=1000))
    assert (len(short.stdout_bytes), short.stdout_truncated) == (1000, True)


async def test_output_that_is_not_utf8(live: Any) -> None:
    result = await done(live.exec(["printf", r"\377\376ok"]))
    assert result.stdout_bytes == b"\xff\xfeok"
    assert result.stdout == "\ufffd\ufffdok"


async def test_background_child_that_keeps_the_pipe(live: Any) -> None:
    started = time.monotonic()
    result = await done(live.exec("sleep 30 & echo $!"))
    assert result.stdout.strip().isdigit()
    assert time.monotonic() - started < 20
    os.kill(int(result.stdout), signal.SIGKILL)


async def test_signals_are_seen(live: Any) -> None:
    result = await done(live.exec(["sh", "-c", "kill -SEGV $$"]))
    assert (result.exit_code, result.signal, result.signal_name) == (139, 11, "SIGSEGV")


async def test_deadline_kills_the_tree(live: Any, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with pytest.raises(CommandTimeout) as caught:
        await done(
            live.exec(f"sleep 60 & echo $! > {pids}; echo begun; sleep 60; true", timeout_s=1)
        )
    assert caught.value.stdout == "begun\n"
    await _until(lambda: not _is_alive(int(pids.read_text())))


async def test_stdin(live: Any) -> None:
    assert (await done(live.exec("cat", stdin="ä\n"))).stdout == "ä\n"
    assert (await done(live.exec("cat", stdin=io.BytesIO(b"file")))).stdout == "file"
    assert (await done(live.exec("cat", stdin=[b"a", b"b"]))).stdout == "ab"
    assert (await done(live.exec("cat"))).stdout == ""


async def test_much_input_and_output_at_once(live: Any) -> None:
    data = os.urandom(3 * 1024 * 1024)
    result = await done(live.exec(["cat"], stdin=data))
    assert result.stdout_bytes == data


async def test_program_that_does_not_read_its_input(live: Any) -> None:
    result = await done(live.exec("exit 4", stdin=b"x" * 1_000_000))
    assert result.exit_code == 4


async def test_failing_source_of_input_kills_the_program(live: Any) -> None:
    def source() -> Any:
        yield b"part"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await done(live.exec("cat; sleep 60", stdin=source()))


async def test_what_cannot_start_is_typed(live: Any) -> None:
    with pytest.raises(InvalidRequest):
        await done(live.exec("true", cwd="/nonexistent"))
    with pytest.raises((InvalidRequest, Unauthenticated)):
        await done(live.exec("true", user="nobody-of-that-name"))
    with pytest.raises((InvalidRequest, FileNotFound)):
        await done(live.exec(["/nonexistent/program"]))


async def test_wrong_token(kit: Kit, server: FakeServer, agent: Agent) -> None:
    server.on("POST", "/v1/sandboxes", Answer(201, sandbox(access_token="wrong")))
    client = kit.Client(base_url=server.url, api_key="k", sandbox_url=agent.url)
    box = await done(client.create())
    with pytest.raises(Unauthenticated):
        await done(box.exec("true"))
    with pytest.raises(Unauthenticated):
        await done(box.files.read("/etc/hostname"))
    await close(client)


# --- processes ---------------------------------------------------------------------


async def test_spawn_follow_feed_and_wait(live: Any) -> None:
    process = await done(live.spawn("read line; echo got $line; exit 5", stdin=True))
    assert process.pid > 0
    assert process.result is None
    await done(process.write_stdin("hello\n"))
    events = await collect(process)
    assert b"".join(event.data for event in events) == b"got hello\n"
    result = await done(process.wait())
    assert (result.exit_code, result.stdout) == (5, "got hello\n")
    with pytest.raises(ProcessNotFound):
        await done(process.write_stdin("x"))
    assert await done(process.kill()) is False


async def test_close_stdin(live: Any) -> None:
    process = await done(live.spawn(["cat"], stdin=True))
    await done(process.write_stdin(b"abc"))
    await done(process.close_stdin())
    assert (await done(process.wait())).stdout == "abc"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, 137), (signal.SIGINT, 130)]
)
async def test_send_signal(live: Any, number: int, code: int) -> None:
    process = await done(live.spawn(["sleep", "60"]))
    await done(process.send_signal(number))
    assert (await done(process.wait())).exit_code == code


async def test_reconnect_by_pid_and_tag(live: Any) -> None:
    process = await done(live.spawn("read x; echo $x; exit 6", stdin=True, tag="mine"))
    await done(process.disconnect())
    assert process.pid in [p.pid for p in await done(live.processes())]
    by_tag = await done(live.attach("mine"))
    assert by_tag.pid == process.pid
    by_pid = await done(live.attach(process.pid))
    await done(by_pid.write_stdin("again\n"))
    assert (await done(by_pid.wait())).stdout == "again\n"
    assert (await done(by_tag.wait())).exit_code == 6
    late = await done(live.attach(process.pid))
    assert (await done(late.wait())).exit_code == 6
    with pytest.raises(ProcessNotFound):
        await done(live.attach(4_000_000))
    with pytest.raises(ConnectionFailed, match="disconnected"):
        await done(process.wait())


async def test_attach_has_its_own_deadline(live: Any) -> None:
    process = await done(live.spawn(["sleep", "60"]))
    attached = await done(live.attach(process.pid, timeout_s=0.5))
    with pytest.raises(CommandTimeout):
        await done(attached.wait())
    assert await done(process.kill()) is True


async def test_cancelling_kills_the_command(
    kit: Kit, live: Any, server: FakeServer, agent: Agent, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    command = f"echo $$ > {pid_file}; sleep 60; true"

    def is_running() -> bool:
        return pid_file.exists() and pid_file.read_text().strip() != ""

    if kit.name == "async":
        task = asyncio.ensure_future(live.exec(command))
        await _until(is_running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        code = f"import opendsec; opendsec.Client().create().exec({command!r})"
        env = {
            **os.environ,
            "OPENDSEC_API_URL": server.url,
            "OPENDSEC_API_KEY": "k",
            "OPENDSEC_SANDBOX_URL": agent.url,
        }
        with subprocess.Popen(
            [sys.executable, "-c", code], env=env, stderr=subprocess.PIPE
        ) as program:
            await _until(is_running)
            program.send_signal(signal.SIGINT)
            _, stderr = program.communicate(timeout=30)
        assert b"KeyboardInterrupt" in stderr
    await _until(lambda: not _is_alive(int(pid_file.read_text())))


async def test_callbacks_get_text_as_it_comes(kit: Kit, live: Any) -> None:
    seen: list[str] = []

    async def later(text: str) -> None:
        await asyncio.sleep(0)
        seen.append(text)

    callback = later if kit.name == "async" else seen.append
    await done(live.exec("echo ä; echo no >&2", on_stdout=callback))
    assert "".join(seen) == "ä\n"


async def test_two_commands_at_once_on_one_client(kit: Kit, live: Any) -> None:
    if kit.name == "async":
        results = await asyncio.gather(*(live.exec(f"sleep 0.2; echo {n}") for n in range(20)))
    else:
        results = [None] * 20

        def one(n: int) -> None:
            results[n] = live.exec(f"sleep 0.2; echo {n}")

        threads = [threading.Thread(target=one, args=(n,)) for n in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(20)]


# --- terminals ---------------------------------------------------------------------


async def test_pty(live: Any) -> None:
    pty = await done(live.pty(["bash", "--norc"], cols=91, rows=33))
    await done(pty.write("stty size; [ -t 0 ] && echo is-a-$((40 + 2))\n"))
    seen = b""
    async for event in each(pty):
        assert event.stream == "pty"
        before, seen = b"is-a-42" in seen, seen + event.data
        if b"is-a-42" in seen and not before:
            await done(pty.resize(101, 44))
            await done(pty.write("stty size; exit 7\n"))
    assert b"33 91" in seen
    assert b"44 101" in seen
    assert (await done(pty.wait())).exit_code == 7


# --- files -------------------------------------------------------------------------


async def test_write_and_read(live: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "ä \u4e16 'x'.txt")
    entry = await done(live.files.write(path, "text ü"))
    assert (entry.path, entry.type) == (path, "file")
    assert await done(live.files.read_text(path)) == "text ü"
    await done(live.files.write(path, b"\x00\xff"))
    assert await done(live.files.read(path)) == b"\x00\xff"
    await done(live.files.write(path, io.BytesIO(b"from a file")))
    assert await done(live.files.read(path)) == b"from a file"
    await done(live.files.write(path, [b"a" * 300_000, b"b"]))
    assert await done(live.files.read(path)) == b"a" * 300_000 + b"b"
    await done(live.files.write(path, b""))
    assert await done(live.files.read(path)) == b""


async def test_write_many(live: Any, tmp_path: Path) -> None:
    names = ["a", "d/b", "ä€", 'quote"', "per%20cent"]
    files = [(str(tmp_path / name), name) for name in names]
    entries = await done(live.files.write_many(files[:3]))
    assert [entry.path for entry in entries] == [path for path, _ in files[:3]]
    await done(live.files.write_many(files))
    for path, text in files:
        assert Path(path).read_text() == text
    assert await done(live.files.write_many([])) == []


async def test_stream(live: Any, tmp_path: Path) -> None:
    data = os.urandom(2_000_000)
    (tmp_path / "big").write_bytes(data)
    async with within(await done(live.files.stream(str(tmp_path / "big")))) as content:
        assert content.size_bytes == len(data)
        assert b"".join([chunk async for chunk in each(content)]) == data
    tail = await done(live.files.stream(str(tmp_path / "big"), offset_bytes=1_999_990))
    assert b"".join(await collect(tail)) == data[-10:]
    abandoned = await done(live.files.stream(str(tmp_path / "big")))
    await close(abandoned)
    assert (await done(live.exec("echo fine"))).ok


async def test_list_stat_move_remove(live: Any, tmp_path: Path) -> None:
    base = str(tmp_path)
    made = await done(live.files.make_dir(f"{base}/x/y"))
    assert made.is_dir
    with pytest.raises(AlreadyExists):
        await done(live.files.make_dir(f"{base}/x/y"))
    await done(live.files.make_dir(f"{base}/x/y", exist_ok=True))
    await done(live.files.write(f"{base}/x/f", "123"))
    os.symlink(f"{base}/x/f", f"{base}/x/link")
    assert [entry.name for entry in await done(live.files.list(f"{base}/x"))] == ["f", "link", "y"]
    assert len(await done(live.files.list(base, depth=3))) == 4
    info = await done(live.files.stat(f"{base}/x/f"))
    assert (info.size_bytes, info.type, oct(info.mode & 0o777)) == (3, "file", "0o644")
    assert info.modified_at is not None
    link = await done(live.files.stat(f"{base}/x/link"))
    assert (link.type, link.symlink_target) == ("file", f"{base}/x/f")
    moved = await done(live.files.move(f"{base}/x/f", f"{base}/g"))
    assert moved.path == f"{base}/g"
    assert await done(live.files.exists(f"{base}/g"))
    await done(live.files.remove(f"{base}/x"))
    await done(live.files.remove(f"{base}/x"))
    assert not await done(live.files.exists(f"{base}/x"))
    with pytest.raises(FileNotFound):
        await done(live.files.list(f"{base}/x"))
    with pytest.raises(FileNotFound):
        await done(live.files.read(f"{base}/x"))
    with pytest.raises(FileNotFound):
        await done(live.files.move(f"{base}/x", f"{base}/z"))
    with pytest.raises(InvalidRequest):
        await done(live.files.read(base))


@pytest.mark.parametrize("recursive", [False, True])
async def test_watch(live: Any, tmp_path: Path, recursive: bool) -> None:
    (tmp_path / "sub").mkdir()
    watch = await done(
        live.files.watch(str(tmp_path), recursive=recursive, include_entry=True, timeout_s=2)
    )
    await done(live.files.write(str(tmp_path / "new"), "x"))
    await done(live.files.write(str(tmp_path / "sub" / "inner"), "x"))
    events = await collect(watch)
    names = {event.name for event in events}
    assert "new" in names
    assert ("sub/inner" in names) == recursive
    created = next(event for event in events if event.type == "create" and event.name == "new")
    assert created.entry is None or created.entry.name == "new"


async def test_watch_of_nothing(live: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFound):
        await done(live.files.watch(str(tmp_path / "none")))


async def test_directories_travel_whole(live: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep" / "empty").mkdir(parents=True)
    (source / "ä €.txt").write_text("unicode")
    (source / "deep" / "run.sh").write_text("#!/bin/sh\n")
    (source / "deep" / "run.sh").chmod(0o755)
    (source / "link").symlink_to("deep/run.sh")
    (source / "big").write_bytes(os.urandom(1_000_000))
    there = tmp_path / "there"
    await done(live.files.upload(source, str(there)))
    _assert_same(source, there)
    await done(live.files.upload(source, str(there)))  # It exists now, so the copy goes into it.
    _assert_same(source, there / "source")
    back = tmp_path / "back"
    await done(live.files.download(str(there / "source"), back))
    _assert_same(source, back)
    await done(live.files.download(str(there / "source" / "big"), tmp_path))
    assert (tmp_path / "big").read_bytes() == (source / "big").read_bytes()
    await done(live.files.upload(source / "big", f"{there}/"))
    assert (there / "big").exists()
    await done(live.files.upload(source / "deep" / "run.sh", f"{there}/copy.sh"))
    assert (there / "copy.sh").stat().st_mode & 0o777 == 0o755
    await done(live.files.download(f"{there}/copy.sh", back))
    assert (back / "copy.sh").stat().st_mode & 0o777 == 0o755
    with pytest.raises(FileNotFoundError):
        await done(live.files.upload(tmp_path / "nothing", "/tmp/x"))
    with pytest.raises(FileNotFound):
        await done(live.files.download(str(tmp_path / "nothing"), tmp_path))


def _assert_same(left: Path, right: Path) -> None:
    names = sorted(str(path.relative_to(left)) for path in left.rglob("*"))
    assert names == sorted(str(path.relative_to(right)) for path in right.rglob("*"))
    for name in names:
        a, b = left / name, right / name
        assert a.is_symlink() == b.is_symlink(), name
        if a.is_file():
            assert a.read_bytes() == b.read_bytes(), name
            assert a.stat().st_mode == b.stat().st_mode, name


# --- ports and the rest ------------------------------------------------------------


async def test_wait_for_port(live: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(WaitTimeout):
        await done(live.wait_for_port(port, timeout_s=0.2))
    process = await done(
        live.spawn(["python3", "-m", "http.server", str(port), "--bind", "127.0.0.1"])
    )
    await done(live.wait_for_port(port, timeout_s=20))
    await done(process.kill())


async def test_signed_urls_open_without_headers(live: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "ä+b c")
    upload = live.files.upload_url(path, expires_in_s=60)
    reply = httpx2.post(
        upload,
        content=b"signed",
        headers={"Content-Type": "application/octet-stream"},
        trust_env=False,
    )
    assert reply.status_code == 200, reply.text
    download = live.files.download_url(path)
    assert httpx2.get(download, trust_env=False).content == b"signed"
    assert httpx2.get(download + "x", trust_env=False).status_code == 401


async def test_is_running(live: Any) -> None:
    assert await done(live.is_running()) is True


@pytest.mark.parametrize("how", ["terminate", "kill"])
async def test_sandbox_that_ends_under_a_command(
    kit: Kit, server: FakeServer, tmp_path: Path, how: str
) -> None:
    with running_agent(tmp_path) as mine:
        server.on("POST", "/v1/sandboxes", Answer(201, sandbox(access_token=mine.token)))
        server.on(
            "GET",
            f"/v1/sandboxes/{SANDBOX_ID}",
            Answer(200, sandbox(state="ended", end_reason="killed", fault="user")),
        )
        client = kit.Client(base_url=server.url, api_key="k", sandbox_url=mine.url)
        box = await done(client.create())
        process = await done(box.spawn("echo begun; sleep 60; true"))
        async for event in each(process):
            assert event.data == b"begun\n"
            break
        if how == "kill":
            mine.process.kill()
        else:
            reply = httpx2.post(
                f"{mine.url}/opendsec/terminate",
                json={"reason": "killed"},
                headers={"X-Opendsec-Control": mine.control_token},
                trust_env=False,
            )
            assert reply.status_code == 204
        with pytest.raises(SandboxNotFound, match="killed"):
            await done(process.wait())
        await close(client)


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


async def _until(condition: Any) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not happen")
