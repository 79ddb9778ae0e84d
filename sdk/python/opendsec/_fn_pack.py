# SPDX-License-Identifier: Apache-2.0
"""From a function to what a worker can run. Pure.

``source``: the text of the function and of what it uses in its own module. It runs on any version
of Python. ``pickle``: cloudpickle takes it apart; client and worker must then have the same minor
version of Python, and the worker needs cloudpickle (``pools.put(…, cloudpickle=True)``).
"""

from __future__ import annotations

import ast
import base64
import builtins
import dis
import importlib.util
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from ._errors import InvalidRequest
from ._fn_values import encode

Pack = Literal["auto", "source", "pickle"]
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
_HINT = "Put all it needs inside of it, or use pack='pickle' (needs cloudpickle)."


def pack_function(function: Callable[..., Any], pack: Pack) -> dict[str, Any]:
    """The ``code`` of a request.

    Raises:
        InvalidRequest: it cannot be packed; the message says what hinders it.
    """
    if pack == "pickle":
        return _pickled(function)
    try:
        return _Source(function).code()
    except InvalidRequest:
        if pack == "source" or not has_cloudpickle():
            raise
        return _pickled(function)


def pack_arguments(
    code: dict[str, Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The part of an item that holds a call's arguments.

    Raises:
        InvalidRequest: one of them is no plain data.
    """
    if "pickle" in code:
        return {"pickled": _dumps((tuple(args), kwargs))}
    return {
        "args": [encode(value) for value in args],
        "kwargs": {name: encode(value) for name, value in kwargs.items()},
    }


def has_cloudpickle() -> bool:
    """Whether functions can be pickled here."""
    return importlib.util.find_spec("cloudpickle") is not None


def cloudpickle_modules() -> dict[str, str]:
    """Sources of cloudpickle, for pools whose template has it not.

    Raises:
        InvalidRequest: it is not installed here.
    """
    whole = _cloudpickle()
    return {
        "cloudpickle": inspect.getsource(whole),
        "cloudpickle.cloudpickle": inspect.getsource(whole.cloudpickle),
    }


def _cloudpickle() -> Any:
    # Not a dependency: few need it.
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        raise _no_cloudpickle() from None


def _no_cloudpickle() -> InvalidRequest:
    return InvalidRequest(
        "cloudpickle is not installed.", remediation="Install `opendsec[functions]`."
    )


def _pickled(function: Callable[..., Any]) -> dict[str, Any]:
    return {"pickle": _dumps(function), "python": PYTHON}


def _dumps(value: Any) -> str:
    cloudpickle = _cloudpickle()
    try:
        return base64.b64encode(cloudpickle.dumps(value)).decode()
    except Exception as exc:
        raise InvalidRequest(f"This cannot be pickled: {exc!r:.300}") from exc


class _Source:
    """Gathers the text of a function and of what it uses."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._entry = function
        self._imports: dict[str, None] = {}
        self._texts: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        self._names: dict[str, Any] = {}

    def code(self) -> dict[str, Any]:
        function = self._entry
        if not isinstance(function, types.FunctionType):
            raise InvalidRequest(
                f"{function!r:.200} is no function made by `def`.",
                remediation="Write a `def` around it, or use pack='pickle' (needs cloudpickle).",
            )
        name = "_lambda" if function.__name__ == "<lambda>" else function.__name__
        self._add(name, function, entry=True)
        lines = ["from __future__ import annotations", *self._imports, *self._texts.values()]
        return {"source": "\n".join(lines) + "\n", "entry": name, "values": self._values}

    def _add(self, name: str, thing: Any, *, entry: bool = False) -> None:
        if name in self._names:
            if self._names[name] is not thing:
                raise InvalidRequest(
                    f"Two different things are called `{name}`.", remediation=_HINT
                )
            return
        self._names[name] = thing
        if isinstance(thing, types.ModuleType):
            self._imports[f"import {thing.__name__} as {name}"
                          if thing.__name__ != name else f"import {name}"] = None  # fmt: skip
        elif isinstance(thing, (types.FunctionType, type)):
            if entry or self._is_ours(thing):
                self._add_text(name, thing, entry=entry)
            else:
                self._import_from(name, thing)
        elif isinstance(thing, types.BuiltinFunctionType) and thing.__module__:
            self._import_from(name, thing)
        else:
            try:
                self._values[name] = encode(thing)
            except InvalidRequest as exc:
                home = getattr(thing, "__module__", None)
                if isinstance(home, str) and getattr(sys.modules.get(home), name, None) is thing:
                    self._imports[f"from {home} import {name}"] = None
                    return
                raise InvalidRequest(
                    f"`{name}`, which `{self._entry.__name__}` uses, is no plain data.",
                    remediation=_HINT,
                ) from exc

    def _is_ours(self, thing: Any) -> bool:
        return bool(thing.__module__ in ("__main__", self._entry.__module__))

    def _import_from(self, name: str, thing: Any) -> None:
        if "." in thing.__qualname__ or thing.__module__ is None:
            raise InvalidRequest(f"`{name}` cannot be imported by name.", remediation=_HINT)
        self._imports[f"from {thing.__module__} import {thing.__qualname__} as {name}"] = None

    def _add_text(self, name: str, thing: Any, *, entry: bool) -> None:
        node = _definition(thing)
        if isinstance(thing, types.FunctionType):
            if entry:
                # What makes calls of it here is not wanted there.
                node.decorator_list = []
            self._add_used(thing, _globals_of(thing.__code__))
            self._add_used(thing, _names_in(_evaluated(node)))
        else:
            scope = sys.modules.get(thing.__module__)
            for used in _names_in([node]):
                if scope is not None and used != name and hasattr(scope, used):
                    self._add(used, getattr(scope, used))
        if isinstance(thing, types.FunctionType):
            node.name = name
        self._texts[name] = ast.unparse(node)

    def _add_used(self, function: types.FunctionType, names: Iterator[str]) -> None:
        code = function.__code__
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        for used in names:
            if used in cells:
                try:
                    self._add(used, _unwrap(cells[used].cell_contents))
                except ValueError:
                    raise InvalidRequest(f"`{used}` has no value yet.") from None
            elif used in function.__globals__:
                self._add(used, _unwrap(function.__globals__[used]))
            elif not hasattr(builtins, used) and used not in code.co_varnames:
                raise InvalidRequest(
                    f"`{used}`, which `{self._entry.__name__}` uses, is not defined.",
                    remediation=_HINT,
                )


def _unwrap(thing: Any) -> Any:
    """Of a function that is itself called remotely: the function."""
    return getattr(thing, "local", thing) if hasattr(thing, "__opendsec_fn__") else thing


def _lambda_of(function: types.FunctionType) -> ast.FunctionDef:
    """A lambda as a `def`. Its lines hold more than itself, so it is searched for in them."""
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError) as exc:
        raise _no_source("a lambda", exc) from exc
    found: dict[str, ast.Lambda] = {}
    start = text.find("lambda")
    while start >= 0:
        for end in range(len(text), start, -1):
            try:
                node = ast.parse(text[start:end], mode="eval").body
            except (SyntaxError, ValueError):
                continue
            if isinstance(node, ast.Lambda) and _same(node, function.__code__):
                found[ast.dump(node)] = node
                break
        start = text.find("lambda", start + 1)
    if len(found) != 1:
        raise InvalidRequest("The lambda cannot be told from its source.", remediation=_HINT)
    (node,) = found.values()
    body: list[ast.stmt] = [ast.Return(node.body)]
    made = ast.parse("def _lambda(): pass").body[0]
    assert isinstance(made, ast.FunctionDef)
    made.args, made.body = node.args, body
    return ast.fix_missing_locations(made)


def _same(node: ast.Lambda, code: types.CodeType) -> bool:
    made = compile(ast.Expression(node), "<lambda>", "eval").co_consts
    inner = next((item for item in made if isinstance(item, types.CodeType)), None)
    if inner is None or _constants(inner) != _constants(code):
        return False
    # A closure's names are looked up otherwise: then the names must do.
    return (inner.co_code, inner.co_names) == (code.co_code, code.co_names) or (
        inner.co_varnames == code.co_varnames
        and {*inner.co_names} == {*code.co_names, *code.co_freevars}
    )


def _constants(code: types.CodeType) -> list[str]:
    return [repr(item) for item in code.co_consts if not isinstance(item, types.CodeType)]


def _no_source(name: str, exc: Exception) -> InvalidRequest:
    return InvalidRequest(
        f"The source of `{name}` cannot be had: {exc}",
        remediation="Define it in a file, or use pack='pickle' (needs cloudpickle).",
    )


def _definition(thing: Any) -> Any:
    if isinstance(thing, types.FunctionType) and thing.__name__ == "<lambda>":
        return _lambda_of(thing)
    try:
        text = textwrap.dedent(inspect.getsource(thing))
        node = ast.parse(text).body[0]
    except (OSError, TypeError, SyntaxError, IndexError) as exc:
        raise _no_source(str(getattr(thing, "__name__", thing)), exc) from exc
    if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        raise InvalidRequest(
            f"`{getattr(thing, '__name__', thing)}` is not made by a plain `def` or `class`.",
            remediation="Async functions run on the caller's side; write a `def`.",
        )
    return node


def _evaluated(node: ast.FunctionDef) -> list[ast.AST]:
    """What of a definition is evaluated when it is made."""
    defaults = [*node.args.defaults, *(value for value in node.args.kw_defaults if value)]
    return [*defaults, *node.decorator_list]


def _names_in(nodes: Sequence[ast.AST]) -> Iterator[str]:
    for node in nodes:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load):
                yield inner.id


def _globals_of(code: types.CodeType) -> Iterator[str]:
    """Names from outside of the function that it or a function in it reads."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(instruction.argval)
    yield from code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _inner_globals(constant)


def _inner_globals(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _inner_globals(constant)
