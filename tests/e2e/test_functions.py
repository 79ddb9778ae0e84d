# SPDX-License-Identifier: AGPL-3.0-only
"""Function calls in real workers, through the server's door: what they hand back, what hostile
code comes to, and that nothing of one call reaches another."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from opendsec import (
    AsyncClient,
    CallResult,
    Client,
    FunctionCancelled,
    FunctionCrashed,
    FunctionDiskFull,
    FunctionOutOfMemory,
    FunctionPoolNotFound,
    FunctionPoolUnusable,
    FunctionRaised,
    FunctionResultInvalid,
    FunctionResultTooLarge,
    FunctionTimeout,
    FunctionWorkerLost,
    InvalidRequest,
    OpendsecError,
)
from tests.harness import BIN, Server
from tests.servers import running_server

OFFSET = 3
SMALL: dict[str, Any] = {"cpu": 1.0, "memory_mb": 128, "disk_mb": 64, "workers_max": 2}


@pytest.fixture(scope="module")
def own_server() -> Iterator[Server]:
    """One that may be killed. Four workers in all, so that projects must share."""
    with running_server("fnc", "10.225.0.0/16", function_workers_max=4, slots_ready=6) as server:
        yield server


@pytest.fixture
def client(own_server: Server) -> Iterator[Client]:
    with Client(base_url=own_server.url, api_key=own_server.api_key) as client:
        client.fn.pools.put("default", **SMALL)
        yield client


@pytest.fixture
async def async_client(own_server: Server, client: Client) -> AsyncClient:
    return AsyncClient(base_url=own_server.url, api_key=own_server.api_key)


def until(condition: Callable[[], bool], timeout_s: float = 40) -> None:
    over_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < over_at
        time.sleep(0.05)


def helper(value: float) -> float:
    return math.sqrt(value) + OFFSET


def grade(value: float, plus: int = OFFSET) -> float:
    return helper(value) + plus


# --- what calls hand back ------------------------------------------------------------


def test_a_function_and_what_it_uses(client: Client) -> None:
    remote = client.fn(grade)
    assert remote(16) == remote.local(16) == 10.0
    assert remote(16, plus=0) == 7.0
    assert client.fn(timeout_s=5)(grade)(4) == 8.0
    assert list(client.fn.map(lambda x: [x, OFFSET], range(3))) == [[0, 3], [1, 3], [2, 3]]


def test_value_output_and_files(client: Client) -> None:
    result = client.fn.run(
        "import os, sys\n"
        "os.makedirs('out')\n"
        "open('out/a.txt', 'w').write(open('in/b.txt').read().upper())\n"
        "os.symlink('/etc/shadow', 'out/c.txt')\n"
        "os.mkfifo('out/d.txt')\n"
        "print('hello'); print('oh', file=sys.stderr)\n"
        "result = {'t': (1, {2}), 'b': b'\\xff', 'n': 1 << 90, 'f': float('inf'), 3: None}\n",
        files={"in/b.txt": "text"},
        collect=["out/*.txt"],
    )
    assert result.value == {"t": (1, {2}), "b": b"\xff", "n": 1 << 90, "f": math.inf, 3: None}
    assert (result.stdout, result.stderr) == ("hello\n", "oh\n")
    assert result.files == {"out/a.txt": b"TEXT"}
    assert result.worker is not None
    assert result.cpu_seconds > 0 and result.seconds > 0 and result.peak_memory_mb > 1


def test_an_exception_has_its_traceback(client: Client) -> None:
    with pytest.raises(FunctionRaised) as caught:
        client.fn(grade)(-1)
    assert caught.value.fault == "user" and caught.value.details["type"] == "ValueError"
    assert "in helper\n" in caught.value.details["traceback"]


async def test_map_in_order_and_as_completed(async_client: AsyncClient) -> None:
    async with async_client as client:
        wanted = [grade(value) for value in range(150)]
        remote = client.fn(grade)
        assert [value async for value in remote.map(range(150))] == wanted
        found = [pair async for pair in remote.map([4, -1, 9], ordered=False, return_errors=True)]
        assert sorted(index for index, _ in found) == [0, 1, 2]
        assert dict(found)[2] == 9.0 and isinstance(dict(found)[1], FunctionRaised)
        with pytest.raises(FunctionRaised):
            async for _ in remote.map([4, -1]):
                pass
        assert list(await asyncio.gather(remote(1), remote(4))) == [7.0, 8.0]


def test_modules_are_there_before_the_call(client: Client) -> None:
    sources = {"ours": "from ours.inner import VALUE\n", "ours.inner": "VALUE = 41 + 1\n"}
    client.fn.pools.put("loaded", **SMALL, modules=sources, preload=["ours", "sqlite3"])
    code = "import sys\nloaded = 'sqlite3' in sys.modules\nimport ours\nresult = loaded, ours.VALUE"
    assert client.fn.run(code, pool="loaded").value == (True, 42)
    client.fn.pools.delete("loaded")


class Box:
    """Nothing that plain data could hold."""

    def __init__(self, value: int) -> None:
        self.value = value

    def plus(self, more: int) -> Box:
        return Box(self.value + more)


def test_pickled_functions(client: Client) -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    client.fn.pools.put("pickles", **SMALL, cloudpickle=True)
    add = client.fn(pool="pickles", pack="pickle", result="pickle")(Box(5).plus)
    assert client.fn.run("result = 1", pool="pickles").value == 1
    if f"{sys.version_info[0]}.{sys.version_info[1]}" == client.fn.pools.get("pickles").python[:4]:
        assert add(3).value == 8
        assert list(client.fn.map(functools.partial(pow, 2), [3, 4], pool="pickles")) == [8, 16]
    with pytest.raises(FunctionRaised, match=r"cloudpickle|Python"):
        client.fn(pack="pickle")(Box(5).plus)(3)
    client.fn.pools.delete("pickles")


def test_output_is_bounded(client: Client) -> None:
    result = client.fn.run("print('x' * 10_000)", output_bytes=100)
    assert result.stdout == "x" * 100 and result.stdout_lost_bytes == 9_901


# --- hostile code ---------------------------------------------------------------------

DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(0.2)
        while True:
            for fd in range(64):
                try: os.write(fd, b'{"value": "forged"}')
                except OSError: pass
            time.sleep(0.01)
    os._exit(0)
result = 'parent'
"""
FORKS = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
ALL_KILLED = (
    "import os\n"
    "for pid in (1, os.getppid(), *range(2, 64)):\n"
    "    if pid != os.getpid():\n"
    "        try: os.kill(pid, 9)\n"
    "        except (PermissionError, ProcessLookupError): pass\n"
    "result = 'alive'"
)
FORGED = (
    "import os\n"
    "for fd in range(3, 64):\n"
    "    try: os.write(fd, b'{\"value\": 1}')\n"
    "    except OSError: pass\n"
    "result = 'real'"
)
FORGED_LINES = """
import os
line = b'{"index": 1, "outcome": "ok", "value": "forged"}'
os.write(3, b'{"value": [0,\\n' + line + b'\\n,1]}')
os._exit(0)
"""
HOSTILE: list[tuple[str, dict[str, Any], type[OpendsecError] | str]] = [
    ("import time\ntime.sleep(60)", {"timeout_s": 0.3}, FunctionTimeout),
    ("while True: print('x' * 1000)", {"timeout_s": 0.3}, FunctionTimeout),
    (FORKS, {"timeout_s": 0.5, "processes": 40}, FunctionTimeout),
    ("import os\nos._exit(3)", {}, FunctionCrashed),
    ("import os\nos.kill(os.getpid(), 9)", {}, FunctionCrashed),
    ("import ctypes\nctypes.string_at(0)", {}, FunctionCrashed),
    ("x = bytearray(90 << 20)", {"memory_mb": 32}, FunctionOutOfMemory),
    ("x = []\nwhile True: x.append(bytearray(8 << 20))", {}, FunctionOutOfMemory),
    ("f = open('/tmp/x', 'wb')\nwhile True: f.write(bytes(1 << 20))", {}, FunctionDiskFull),
    ("f = open('/dev/shm/x', 'wb')\nwhile True: f.write(bytes(1 << 20))", {}, FunctionDiskFull),
    ("result = 'x' * (9 << 20)", {}, FunctionResultTooLarge),
    ("result = object()", {}, FunctionResultInvalid),
    ("r = []\nfor _ in range(100_000): r = [r]\nresult = r", {}, FunctionResultInvalid),
    (FORGED, {}, FunctionResultInvalid),
    (FORGED_LINES, {}, FunctionResultInvalid),
    ("import os\nos.write(3, b'{\"value\": 1e999}')\nos._exit(0)", {}, FunctionResultInvalid),
    (ALL_KILLED, {}, "alive"),
    (DAEMON, {}, "parent"),
]


def test_hostile_calls_are_typed_and_harm_no_other(client: Client) -> None:
    for source, options, wanted in HOSTILE:
        result = client.fn.run(source, check=False, retries=0, **options)
        if isinstance(wanted, str):
            assert result.value == wanted, (source, result)
        else:
            assert type(result.error) is wanted, (source, result)
            assert result.error.fault == "user", source
        # Whatever it left: the next ones are not touched by it.
        left = client.fn.run(
            "import os\n"
            "mine = [p for p in os.listdir('/proc') if p.isdigit()\n"
            "        and os.stat('/proc/' + p).st_uid not in (0, os.getuid())]\n"
            "result = mine, [os.listdir(d) for d in ('.', '/tmp', '/dev/shm')]"
        )
        assert left.value == ([], [[], [], []]), source


def test_what_cannot_be_scrubbed_is_replaced(client: Client) -> None:
    client.fn.pools.put("one", **{**SMALL, "workers_max": 1})
    first = client.fn.run("result = 1", pool="one").worker
    assert client.fn.run("result = 1", pool="one").worker == first
    made = "import ctypes\nresult = ctypes.CDLL(None).shmget(4711, 4096, {})"
    assert client.fn.run(made.format("0o1666"), pool="one").value >= 0
    after = client.fn.run(made.format("0"), pool="one")
    assert after.value == -1 and after.worker != first
    client.fn.pools.delete("one")


SEARCH = """
import os, re
own = 'MARK-' + 'f' * 16 + '-KRAM'
pattern = re.compile(b'MA' + b'RK-([0-9a-f]{16})-KR' + b'AM')
found = set()
for line in open('/proc/self/maps'):
    place, rights = line.split()[:2]
    begin, end = (int(part, 16) for part in place.split('-'))
    if rights.startswith('rw'):
        with open('/proc/self/mem', 'rb', 0) as memory:
            memory.seek(begin)
            found.update(match.decode() for match in pattern.findall(memory.read(end - begin)))
opened = []
for pid in os.listdir('/proc'):
    for name in ('environ', 'mem', 'fd'):
        path = '/proc/' + pid + '/' + name
        if pid.isdigit() and int(pid) != os.getpid() and os.access(path, os.R_OK):
            opened.append(path)
result = sorted(found), opened
"""


def test_a_call_finds_nothing_of_an_earlier_one(client: Client) -> None:
    client.fn.pools.put("one", **{**SMALL, "workers_max": 1})
    secret = uuid.uuid4().hex[:16]
    source = "def f(text):\n    print(text)\n    return text\n"
    told = client.fn.run(source, entry="f", args=[f"MARK-{secret}-KRAM"], pool="one")
    after = client.fn.run(SEARCH, pool="one")
    assert after.worker == told.worker
    assert after.value == (["f" * 16], [])
    client.fn.pools.delete("one")


def test_pools_that_cannot_serve_say_why(client: Client) -> None:
    client.fn.pools.put("bad", **SMALL, preload=["no_such_module"])
    with pytest.raises(FunctionPoolUnusable, match="no_such_module"):
        client.fn.run("result = 1", pool="bad")
    client.fn.pools.put("bad", **SMALL, env={"PATH": "/nowhere"})
    with pytest.raises(FunctionPoolUnusable, match="python3"):
        client.fn.run("result = 1", pool="bad")
    assert client.fn.pools.get("bad").last_error is not None
    client.fn.pools.delete("bad")
    with pytest.raises(FunctionPoolNotFound):
        client.fn.run("result = 1", pool="bad")


# --- workers that go away, callers that go away ------------------------------------------


def test_a_lost_worker_is_an_error_and_never_a_result(client: Client) -> None:
    def end_it() -> None:
        until(lambda: client.fn.pools.get("default").workers_busy > 0)
        for sandbox in client.list(metadata={"opendsec.function_pool": "default"}):
            client.kill(sandbox.sandbox_id)

    for retries in (0, 1):
        with ThreadPoolExecutor(1) as pool:
            killing = pool.submit(end_it)
            code = "import time\ntime.sleep(2)\nresult = 5"
            result = client.fn.run(code, check=False, retries=retries)
            killing.result()
        if retries:
            assert result.value == 5
        else:
            assert isinstance(result.error, FunctionWorkerLost)
            assert result.error.fault == "platform" and result.error.retryable


def test_what_nobody_waits_for_is_given_up(client: Client) -> None:
    def slow(number: int) -> int:
        import time

        time.sleep(30 if number else 0)
        return number

    calls = client.fn(slow).map(range(50), ordered=False)
    assert next(iter(calls)) == (0, 0)
    calls.close()  # type: ignore[attr-defined]

    def idle() -> bool:
        pool = client.fn.pools.get("default")
        return pool.calls_waiting == pool.workers_busy == 0

    until(idle)
    assert client.fn.run("result = 1").value == 1


def test_a_deleted_pool_ends_its_calls(client: Client) -> None:
    client.fn.pools.put("gone", **SMALL)
    with ThreadPoolExecutor(1) as pool:
        code = "import time\ntime.sleep(30)"
        waiting = pool.submit(client.fn.run, code, pool="gone", check=False, retries=0)
        until(lambda: client.fn.pools.get("gone").workers_busy == 1)
        client.fn.pools.delete("gone")
        assert isinstance(waiting.result().error, FunctionCancelled)


def test_projects_share_and_never_mix(client: Client, own_server: Server) -> None:
    status, made = own_server.request_json("POST", "/v1/projects", {"name": "other"})
    assert status == 201, made
    other = {"X-Project-Id": made["project_id"]}

    def ask(method: str, path: str, body: object | None = None) -> tuple[int, Any]:
        status, _, text = own_server.request(method, path, body, headers=other)
        return status, json.loads(text or b"null")

    client.fn.pools.put("greedy", **{**SMALL, "workers_max": 4})
    code = "import time\ntime.sleep(0.1)\nresult = 1"
    with ThreadPoolExecutor(1) as pool:
        # It would take ten seconds, and all the workers that there may be.
        many = pool.submit(
            lambda: list(client.fn.map(_sleeps, range(400), pool="greedy", ordered=False))
        )
        until(lambda: client.fn.pools.get("greedy").workers_busy >= 2)
        assert ask("GET", "/v1/functions/pools/greedy")[0] == 404
        status, _ = ask("PUT", "/v1/functions/pools/small", {**SMALL, "workers_max": 1})
        assert status == 200
        status, result = ask(
            "POST", "/v1/functions/run", {"pool": "small", "code": {"source": code}}
        )
        assert status == 200 and result["value"] == 1, result
        assert not many.done()
        assert len(many.result()) == 400
    names = [sandbox.sandbox_id for sandbox in client.list()]
    assert result["worker"] not in names
    assert ask("DELETE", "/v1/functions/pools/small")[0] == 204
    client.fn.pools.delete("greedy")


def _sleeps(number: int) -> int:
    import time

    time.sleep(0.1)
    return number


def test_a_killed_server_leaves_no_worker_behind(client: Client, own_server: Server) -> None:
    client.fn.pools.put("kept", **{**SMALL, "workers_max": 1}, workers_min=1)
    before = client.fn.run("result = 1", pool="kept").worker
    with ThreadPoolExecutor(1) as pool:
        code = "import time\ntime.sleep(30)"
        cut = pool.submit(client.fn.run, code, pool="kept", check=False, retries=0)
        until(lambda: client.fn.pools.get("kept").workers_busy == 1)
        own_server.kill_daemon()
        with pytest.raises(OpendsecError) as caught:
            cut.result()
        assert caught.value.fault == "platform"
    own_server.start()
    until(lambda: client.fn.pools.get("kept").workers_idle == 1)
    alive = {sandbox.sandbox_id for sandbox in client.list()}
    assert before not in alive
    result: CallResult = client.fn.run("result = 2", pool="kept")
    assert result.value == 2 and result.worker in alive
    client.fn.pools.delete("kept")


# --- the door -----------------------------------------------------------------------------

BAD: list[tuple[str, object]] = [
    ("/v1/functions/run", {}),
    ("/v1/functions/run", {"code": {}}),
    ("/v1/functions/run", {"code": {"source": "1", "pickle": "AA=="}}),
    ("/v1/functions/run", {"code": {"source": "1", "entry": "a b"}}),
    ("/v1/functions/run", {"code": {"pickle": "###"}}),
    ("/v1/functions/run", {"code": {"source": "1"}, "timeout_s": -1}),
    ("/v1/functions/run", {"code": {"source": "1"}, "memory_mb": 1}),
    ("/v1/functions/run", {"code": {"source": "1"}, "collect": ["../x"]}),
    ("/v1/functions/run", {"code": {"source": "1"}, "env": {"A=B": "c"}}),
    ("/v1/functions/run", {"code": {"source": "1"}, "item": {"files": {"/etc/x": ""}}}),
    ("/v1/functions/run", {"code": {"source": "1"}, "item": {"files": {"x": "%"}}}),
    ("/v1/functions/map", {"code": {"source": "1"}, "items": []}),
    ("/v1/functions/map", {"code": {"source": "1"}, "items": [{"args": 1}]}),
]


def test_bad_requests_are_refused(client: Client, own_server: Server) -> None:
    for path, body in BAD:
        status, answer = own_server.request_json("POST", path, body)
        assert (status, answer["error"]["code"]) == (400, "invalid_request"), (body, answer)
    for values in (
        {"workers_min": 9},
        {"preload": ["a b"]},
        {"memory_mb": 1},
        {"modules": {"": ""}},
    ):
        status, answer = own_server.request_json("PUT", "/v1/functions/pools/x", values)
        assert status == 400, (values, answer)
    with pytest.raises(InvalidRequest):
        client.fn.pools.put("../x", **SMALL)
    with pytest.raises(InvalidRequest, match="plain data"):
        client.fn(grade)(object())  # type: ignore[arg-type]
    broken = client.fn.run("def f(:", check=False)
    assert isinstance(broken.error, FunctionRaised) and "SyntaxError" in broken.error.message


def test_command_line(client: Client, own_server: Server, tmp_path: Any) -> None:
    def opendsec(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(BIN / "opendsec"), "fn", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=own_server.client_environment,
            timeout=60,
        )

    (tmp_path / "square.py").write_text("def square(x):\n    return x * x\n")
    done = opendsec("run", "square.py", "--entry", "square", "--arg", "7")
    assert (done.returncode, done.stdout) == (0, "49\n"), done.stderr
    lines = opendsec("map", "square.py", "--entry", "square", stdin="1\n2\n\n3\n").stdout
    assert [json.loads(line) for line in lines.splitlines()] == [
        {"value": 1}, {"value": 4}, {"value": 9},
    ]  # fmt: skip
    failed = opendsec("run", "-c", "1 / 0")
    assert failed.returncode == 1 and "ZeroDivisionError" in failed.stderr
    code = "import os; os.mkdir('o'); open('o/x', 'w').write('data')"
    assert opendsec("run", "-c", code, "--collect", "o/*", "--out", "got").returncode == 0
    assert (tmp_path / "got/o/x").read_text() == "data"
    assert opendsec("pool", "set", "cli", "--workers", "1").returncode == 0
    assert "cli" in opendsec("pool", "ls").stdout
    assert opendsec("pool", "rm", "cli", "nope").returncode == 1
