# SPDX-License-Identifier: AGPL-3.0-only
"""The system call filter, compiled once.

Compiling ``seccomp.json`` takes crun 6 ms of processor time at every start, more than half of all
it does. crun takes a ready filter by annotation, so it is compiled here, by the same library.
Other runtimes get the profile itself.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

BPF_ANNOTATION = "run.oci.seccomp_bpf_data"

_ARCHITECTURES = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}
_ACT_ALLOW = 0x7FFF0000
_ACT_ERRNO = 0x00050000
_ATTR_OPTIMIZE = 8
_OPTIMIZE_BINARY_TREE = 2
_COMPARE = {
    "SCMP_CMP_NE": 1,
    "SCMP_CMP_LT": 2,
    "SCMP_CMP_LE": 3,
    "SCMP_CMP_EQ": 4,
    "SCMP_CMP_GE": 5,
    "SCMP_CMP_GT": 6,
    "SCMP_CMP_MASKED_EQ": 7,
}


class SeccompError(Exception):
    """The filter cannot be compiled here."""


class _Compare(ctypes.Structure):
    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("datum_a", ctypes.c_uint64),
        ("datum_b", ctypes.c_uint64),
    )


@cache
def profile() -> dict[str, Any]:
    """The profile in OCI form, for this machine's native architecture."""
    raw: dict[str, Any] = json.loads(Path(__file__).with_name("seccomp.json").read_text())
    return {**raw, "architectures": [_ARCHITECTURES[platform.machine()]]}


def _action(rule: dict[str, Any], errno_key: str = "errnoRet") -> int:
    name = rule.get("action", rule.get("defaultAction"))
    return _ACT_ALLOW if name == "SCMP_ACT_ALLOW" else _ACT_ERRNO | rule[errno_key]


def _library() -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL("libseccomp.so.2")
    except OSError as exc:
        raise SeccompError("libseccomp.so.2 is not installed") from exc
    lib.seccomp_init.restype = ctypes.c_void_p
    lib.seccomp_init.argtypes = [ctypes.c_uint32]
    lib.seccomp_release.argtypes = [ctypes.c_void_p]
    lib.seccomp_attr_set.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32]
    lib.seccomp_export_bpf.argtypes = [ctypes.c_void_p, ctypes.c_int]
    lib.seccomp_syscall_resolve_name.argtypes = [ctypes.c_char_p]
    lib.seccomp_rule_add_array.argtypes = [
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.POINTER(_Compare),
    ]
    return lib


@cache
def compiled() -> str:
    """The filter as a classic BPF program, base64.

    Raises:
        SeccompError: libseccomp is missing or refuses the profile.
    """
    lib = _library()
    rules = profile()
    context = lib.seccomp_init(_action(rules, "defaultErrnoRet"))
    if not context:
        raise SeccompError("libseccomp cannot be initialised")
    try:
        # Best effort: older libraries know only the linear form.
        lib.seccomp_attr_set(context, _ATTR_OPTIMIZE, _OPTIMIZE_BINARY_TREE)
        for rule in rules["syscalls"]:
            _add(lib, context, rule)
        return base64.b64encode(_export(lib, context)).decode()
    finally:
        lib.seccomp_release(context)


def _add(lib: ctypes.CDLL, context: int, rule: dict[str, Any]) -> None:
    conditions = [
        _Compare(c["index"], _COMPARE[c["op"]], c["value"], c.get("valueTwo", 0))
        for c in rule.get("args", [])
    ]
    array = (_Compare * len(conditions))(*conditions)
    for name in rule["names"]:
        number = lib.seccomp_syscall_resolve_name(name.encode())
        if number < 0:  # not on this architecture, or newer than the library
            continue
        code = lib.seccomp_rule_add_array(
            context, _action(rule), number, len(conditions), array if conditions else None
        )
        if code != 0:
            raise SeccompError(f"rule for {name}: {os.strerror(-code)}")


def _export(lib: ctypes.CDLL, context: int) -> bytes:
    fd = os.memfd_create("seccomp")
    try:
        code = lib.seccomp_export_bpf(context, fd)
        if code != 0:
            raise SeccompError(f"export: {os.strerror(-code)}")
        return os.pread(fd, os.fstat(fd).st_size, 0)
    finally:
        os.close(fd)
