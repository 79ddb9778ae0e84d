# SPDX-License-Identifier: AGPL-3.0-only
# ruff: noqa: PTH103, PTH120, PTH123
# ruff: noqa: PTH207, PTH208, UP031
"""The worker's zygote: imports modules in advance, and forks a process for each call."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import gc
import glob
import importlib
import json
import linecache
import math
import os
import pickle
import resource
import signal
import socket
import stat
import struct
import sys
import time
import traceback
import types
import warnings
from typing import Any, TextIO

SIZES = struct.Struct("!III")
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 4, 38, 36
COMMON = (
    "bisect", "collections", "copy", "csv", "dataclasses", "datetime", "decimal", "difflib",
    "enum", "functools", "hashlib", "heapq", "inspect", "io", "itertools", "logging", "operator",
    "pathlib", "random", "re", "shutil", "statistics", "string", "subprocess", "tempfile",
    "textwrap", "threading", "typing", "unittest", "uuid",
)  # fmt: skip
"""What most calls import: once here instead of in each of them."""
END_S = 8.0
"""What a call started is killed within so long, or the worker is given up."""
TRACEBACK_CHARS_MAX = 16_000
FILES_MAX = 1_000
EXACT = 1 << 53
RESULT, PAYLOAD = 3, 4
EXIT_BROKEN = 70

_prctl = ctypes.CDLL(None, use_errno=True).prctl


def prctl(option: int, value: int) -> None:
    """See prctl(2). Its arguments are longs, whatever C makes of Python's integers."""
    zero = ctypes.c_ulong(0)
    if _prctl(option, ctypes.c_ulong(value), zero, zero, zero) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


# --- values -----------------------------------------------------------------


class Unencodable(Exception):
    """A value that plain data cannot hold."""


def encode(value: Any) -> Any:
    """A value as JSON. What JSON lacks is marked by the key ``~``."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if -EXACT <= value <= EXACT else {"~": "int", "v": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"~": "float", "v": repr(value)}
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            return {"~": "str", "v": _b64(value.encode("utf-8", "surrogatepass"))}
        return value
    if kind is list:
        return [encode(item) for item in value]
    if kind is dict:
        if all(type(key) is str and key != "~" and key.isprintable() for key in value):
            return {key: encode(item) for key, item in value.items()}
        return {"~": "dict", "v": [[encode(key), encode(item)] for key, item in value.items()]}
    if kind in (tuple, set, frozenset):
        return {"~": kind.__name__, "v": [encode(item) for item in value]}
    if kind in (bytes, bytearray):
        return {"~": kind.__name__, "v": _b64(bytes(value))}
    if kind is complex:
        return {"~": "complex", "v": [repr(value.real), repr(value.imag)]}
    raise Unencodable("%s.%s" % (kind.__module__, kind.__qualname__))


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def decode(value: Any) -> Any:
    """The value that ``encode`` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("~")
    if kind is None:
        return {key: decode(item) for key, item in value.items()}
    inner = value["v"]
    if kind == "int":
        return int(inner, 16)
    if kind == "float":
        return float(inner)
    if kind == "str":
        return base64.b64decode(inner).decode("utf-8", "surrogatepass")
    if kind == "dict":
        return {decode(key): decode(item) for key, item in inner}
    if kind in ("bytes", "bytearray"):
        data = base64.b64decode(inner)
        return data if kind == "bytes" else bytearray(data)
    if kind == "complex":
        return complex(float(inner[0]), float(inner[1]))
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](
        [decode(item) for item in inner]
    )


# --- the process of a call ---------------------------------------------------


def become(call: dict[str, Any], fds: list[int]) -> None:
    """From a copy of the zygote to a process that can do nothing but its call."""
    os.setsid()
    high = []
    for fd in fds:
        new = os.dup(fd)
        while new <= PAYLOAD:
            new = os.dup(fd)
        high.append(new)
    given, result, out, err = high
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    # Programs that the call starts do not get these two.
    os.dup2(result, RESULT, inheritable=False)
    os.dup2(given, PAYLOAD, inheritable=False)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > PAYLOAD:
            with contextlib.suppress(OSError):
                os.close(int(name))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    limit(resource.RLIMIT_CORE, 0)
    uid = call["uid"]
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    # So that it can look at itself (/proc/self/fd); nobody else has its user.
    prctl(PR_SET_DUMPABLE, 1)
    os.umask(0o022)
    os.chdir(call["place"])
    os.environ.update(
        HOME=call["place"], TMPDIR=call["place"], USER="call", LOGNAME="call", PWD=call["place"]
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # New ones: what the zygote's know of their files is not true of these.
    sys.stdout = sys.__stdout__ = text_stream(1)  # type: ignore[assignment,misc]
    sys.stderr = sys.__stderr__ = text_stream(2)  # type: ignore[assignment,misc]
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()  # Else every call would draw the same.


def text_stream(fd: int) -> TextIO:
    return open(fd, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)


def limit(which: int, value: int) -> None:
    _soft, hard = resource.getrlimit(which)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(which, (value, value))


def data_bytes() -> int:
    """What the modules imported in advance take: a call's limit comes on top."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    return 0


def payload() -> tuple[dict[str, Any], dict[str, Any]]:
    with os.fdopen(PAYLOAD, "rb") as file:
        # It may be long until there is something to read.
        limits_len, code_len, item_len = SIZES.unpack(file.read(SIZES.size))
        limits = json.loads(file.read(limits_len))
        limit(resource.RLIMIT_NPROC, limits["processes"])
        if limits["memory"]:
            limit(resource.RLIMIT_DATA, data_bytes() + limits["memory"])
        return json.loads(file.read(code_len)), json.loads(file.read(item_len))


def bring_files(files: dict[str, str]) -> None:
    for name, text in files.items():
        folder = os.path.dirname(name)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(name, "wb") as file:
            file.write(base64.b64decode(text))


def take_files(patterns: list[str], bytes_max: int) -> dict[str, str]:
    """The files that match. A link is no file, so that none leads out of the call's directory."""
    found: dict[str, str] = {}
    total = 0
    for pattern in patterns:
        for name in sorted(glob.glob(pattern, recursive=True)):
            if name in found:
                continue
            try:
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:
                continue
            with os.fdopen(fd, "rb") as file:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    continue
                data = file.read(bytes_max - total + 1)
            total += len(data)
            if total > bytes_max or len(found) >= FILES_MAX:
                raise TooLarge
            found[os.path.normpath(name)] = _b64(data)
    return found


class TooLarge(Exception):
    """More files than a call may hand back."""


def work(code: dict[str, Any], item: dict[str, Any]) -> Any:
    """Run what was sent; its value."""
    if code["kind"] == "pickle":
        if code.get("python") not in (None, "%d.%d" % sys.version_info[:2]):
            raise RuntimeError(
                "pickled by Python %s, and this is %d.%d: send the function as source, or use a "
                "template with that version" % (code["python"], *sys.version_info[:2])
            )
        function = pickle.loads(base64.b64decode(code["data"]))  # noqa: S301
        values, named = pickle.loads(base64.b64decode(item["pickled"]))  # noqa: S301
        return function(*values, **named)
    module = types.ModuleType("__main__")
    module.__dict__["__file__"] = "<call>"
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    if code.get("values"):
        module.__dict__.update(decode(code["values"]))
    source = code["source"]
    # So that tracebacks show lines.
    linecache.cache["<call>"] = (len(source), None, source.splitlines(True), "<call>")
    exec(compile(source, "<call>", "exec"), module.__dict__)  # noqa: S102
    if not code.get("entry"):
        return module.__dict__.get("result")
    function = module.__dict__[code["entry"]]
    return function(*decode(item.get("args", [])), **decode(item.get("kwargs", {})))


def outcome() -> dict[str, Any]:
    """What the call comes to, for the result's pipe."""
    try:
        code, item = payload()
        os.environ.update(code.get("env") or {})
        os.environ.update(item.get("env") or {})
        bring_files(item.get("files") or {})
        value = work(code, item)
    except SystemExit as exc:
        if exc.code is None or exc.code == 0:
            value = None
        else:
            return {"raised": {"type": "SystemExit", "message": str(exc.code)[:1000],
                               "traceback": ""}}  # fmt: skip
    except BaseException as exc:
        return raised(exc)
    try:
        how = code.get("result", "data")
        if how == "pickle":
            # It takes more than pickle does, where the template or the pool has it.
            pickler: Any = sys.modules.get("cloudpickle", pickle)
            answer = {"value": {"~": "pickle", "v": _b64(pickler.dumps(value))}}
        else:
            answer = {"value": encode(value)}
        answer["files"] = take_files(code.get("collect") or [], code["files_max"])
    except Unencodable as exc:
        return {"unencodable": str(exc)}
    except TooLarge:
        return {"too_large": True}
    except BaseException as exc:
        return {"unencodable": "%s: %s" % (type(exc).__name__, str(exc)[:500])}
    return answer


def raised(exc: BaseException) -> dict[str, Any]:
    kind = type(exc)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = "%s.%s" % (kind.__module__, name)
    try:
        message = str(exc)
    except Exception:
        message = "(its text cannot be had)"
    try:
        # Without the frames of this program.
        trace = exc.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != "<call>":
            trace = trace.tb_next
        text = "".join(traceback.format_exception(kind, exc, trace or exc.__traceback__))
    except Exception:
        text = ""
    answer = {
        "type": name,
        "message": message[:4_000],
        "traceback": text[-TRACEBACK_CHARS_MAX:],
    }
    found: dict[str, Any] = {"raised": answer}
    if isinstance(exc, MemoryError):
        found["memory"] = True
    if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT):
        found["disk"] = True
    return found


def warm_up() -> None:
    """Touch what every call needs, while there is nothing to do: after a fork the first use of each
    page of memory costs more than the work."""
    scope: dict[str, Any] = {}
    source = "def warm(x):\n    return [x, str(x)]\n"
    exec(compile(source, "<warm>", "exec"), scope)  # noqa: S102
    json.loads(json.dumps({"value": encode(scope["warm"](decode([1])[0]))}))
    base64.b64decode(base64.b64encode(b"warm"))
    linecache.cache.get("<warm>")
    types.ModuleType("warm")
    data_bytes()
    glob.has_magic("*")


def run_call(call: dict[str, Any], fds: list[int]) -> None:
    """Never returns."""
    try:
        become(call, fds)
    except BaseException:
        with contextlib.suppress(BaseException):
            os.write(2, traceback.format_exc().encode())
        os._exit(EXIT_BROKEN)
    try:
        warm_up()
        found = outcome()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        text = memoryview(json.dumps(found).encode())
        while text:
            text = text[os.write(RESULT, text) :]
    except BaseException:
        os._exit(EXIT_BROKEN)
    os._exit(0)


# --- the zygote ---------------------------------------------------------------


def kill_all_of(uid: int) -> None:
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        os._exit(0)
    os.waitpid(pid, 0)


def wait_for(pid: int, uid: int) -> dict[str, Any]:
    """Until the call and all that it started are gone."""
    while True:
        done, status, used = os.wait4(-1, 0)
        if done == pid:
            break
    report = {
        "status": status,
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_kb": used.ru_maxrss,
        "clean": False,
    }
    until = time.monotonic() + END_S
    while time.monotonic() < until:
        try:
            done, _status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            # Orphans come to us: without a child, nothing of the call is left.
            report["clean"] = True
            break
        if done == 0:
            kill_all_of(uid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)
    return report


def take(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A message and the files that came with it."""
    text, ancillary, _flags, _address = sock.recvmsg(1 << 16, socket.CMSG_SPACE(16))
    if not text:
        os._exit(0)
    fds: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            count = len(data) // 4
            fds += struct.unpack("%di" % count, data[: count * 4])
    return json.loads(text), fds


def prepare(config: dict[str, Any]) -> None:
    """Modules that were sent, and imports in advance."""
    os.environ.update(config.get("env") or {})
    os.environ.pop("OPENDSEC_FN_SECRET", None)
    sources = config.get("modules") or {}
    for name in sorted(sources, key=lambda name: name.count(".")):
        module = types.ModuleType(name)
        if any(other.startswith(name + ".") for other in sources):
            module.__path__ = []
        module.__file__ = "<module %s>" % name
        module.__package__ = name if hasattr(module, "__path__") else name.rpartition(".")[0]
        sys.modules[name] = module
    for name in sorted(sources, key=lambda name: -name.count(".")):
        exec(  # noqa: S102
            compile(sources[name], "<module %s>" % name, "exec"), sys.modules[name].__dict__
        )
        parent, _, last = name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], last, sys.modules[name])
    for name in COMMON:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for name in config.get("preload") or []:
        importlib.import_module(name)


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    sys.argv = [""]
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    _message, fds = take(sock)
    try:
        with os.fdopen(fds[0], "rb") as file:
            prepare(json.load(file))
    except BaseException as exc:
        found = raised(exc)["raised"]
        text = "%s: %s" % (found["type"], found["message"])
        sock.send(json.dumps({"failed": text[:2_000]}).encode())
        return
    # Forking beside threads of imported modules is theirs to bear.
    warnings.simplefilter("ignore", DeprecationWarning)
    gc.collect()
    gc.freeze()
    sock.send(json.dumps({"ready": "%d.%d.%d" % sys.version_info[:3]}).encode())
    while True:
        call, fds = take(sock)
        pid = os.fork()
        if pid == 0:
            sock.close()
            run_call(call, fds)
        for fd in fds:
            os.close(fd)
        sock.send(json.dumps(wait_for(pid, call["uid"])).encode())


if __name__ == "__main__":
    main()
