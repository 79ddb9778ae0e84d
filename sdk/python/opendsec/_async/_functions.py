# SPDX-License-Identifier: Apache-2.0
"""Function calls: short stateless calls on workers that are there already."""

from __future__ import annotations

import base64
import builtins
import functools
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import replace
from typing import Any, Generic, ParamSpec, TypeVar, overload
from urllib.parse import quote

import msgspec

from opendsec import _fn_pack
from opendsec._errors import FunctionWorkerLost, InvalidRequest, OpendsecError
from opendsec._fn_models import CallLine, CallOptions, CallResult, FunctionPool, result_of
from opendsec._fn_pack import Pack
from opendsec._retry import Repeat

from . import _concurrency
from ._ndjson import open_lines
from ._transport import AsyncTransport

P = ParamSpec("P")
R = TypeVar("R")

ITEMS_PER_REQUEST = 2_000
BYTES_PER_REQUEST = 8 * 1024 * 1024
RETRIES_DEFAULT = 2
RETRY_PAUSE_S = 0.5


class _Pools(msgspec.Struct):
    pools: list[FunctionPool] = []


class _Nothing(msgspec.Struct):
    pass


class AsyncFunctionPools:
    """Pools of workers. A pool's workers are sandboxes of the project, and never shared with
    another project."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def put(
        self,
        name: str,
        *,
        template: str = "base",
        backend: str | None = None,
        cpu: float = 1.0,
        memory_mb: int = 512,
        disk_mb: int = 512,
        env: Mapping[str, str] | None = None,
        internet: bool = True,
        modules: Mapping[str, str] | None = None,
        cloudpickle: bool = False,
        preload: Sequence[str] = (),
        workers_min: int = 0,
        workers_max: int = 4,
        idle_s: float = 120.0,
        calls_max: int = 10_000,
    ) -> FunctionPool:
        """Make a pool, or change the one of that name.

        Args:
            name: Letters, digits and ``._-``.
            template: What workers are made from. It needs ``python3`` (3.8 or later).
            backend: None: the server's default.
            cpu: Cores of a worker.
            memory_mb: Memory of a worker, in MiB.
            disk_mb: Writable disk of a worker, in MiB.
            env: Environment of every call.
            internet: Whether calls reach the internet.
            modules: Name → source of modules that calls can import beside the template's.
            cloudpickle: Send the client's cloudpickle as such a module, for pickled functions.
            preload: Modules that a worker imports once, so that calls find them imported.
            workers_min: Kept ready without calls.
            workers_max: As many calls run at once.
            idle_s: A worker above ``workers_min`` with nothing to do for so long is ended.
            calls_max: A worker is replaced after so many calls.

        Raises:
            InvalidRequest: a value makes no sense.
            QuotaExceeded: the project has as many pools as may be.
        """
        sources = dict(modules or {})
        loads = list(preload)
        if cloudpickle:
            sources |= _fn_pack.cloudpickle_modules()
            loads.append("cloudpickle")
        body = {
            "template": template,
            "backend": backend,
            "cpu": cpu,
            "memory_mb": memory_mb,
            "disk_mb": disk_mb,
            "env": dict(env or {}),
            "internet": internet,
            "modules": sources,
            "preload": loads,
            "workers_min": workers_min,
            "workers_max": workers_max,
            "idle_s": idle_s,
            "calls_max": calls_max,
        }
        return await self._transport.api("PUT", _pool_path(name), FunctionPool, body=body)

    async def list(self) -> builtins.list[FunctionPool]:
        """The project's pools, by name."""
        return (await self._transport.api("GET", "/v1/functions/pools", _Pools)).pools

    async def get(self, name: str) -> FunctionPool:
        """One pool, and what it does now.

        Raises:
            FunctionPoolNotFound: there is none of that name.
        """
        return await self._transport.api("GET", _pool_path(name), FunctionPool)

    async def delete(self, name: str) -> None:
        """End a pool's workers and forget it. Calls that wait or run come out as cancelled.

        Raises:
            FunctionPoolNotFound: there is none of that name.
        """
        await self._transport.api("DELETE", _pool_path(name), _Nothing)


class AsyncFunction(Generic[P, R]):
    """A function whose calls run in workers.

    Attributes:
        local: The function itself.
        options: How it is called.
    """

    __opendsec_fn__ = True

    def __init__(
        self, functions: AsyncFunctions, function: Callable[P, R], options: CallOptions
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self._functions = functions
        self.local = function
        self.options = options

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call it in a worker; what it returns.

        Raises:
            As ``AsyncFunctions.run``.
        """
        result = await self.run(args, dict(kwargs))
        value: R = result.get()
        return value

    async def run(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        files: Mapping[str, bytes | str] | None = None,
        retries: int = RETRIES_DEFAULT,
    ) -> CallResult:
        """Call it in a worker; everything that came of it. Raises nothing that the function did:
        see ``error`` of the result.

        Args:
            args: Its arguments.
            kwargs: Its named arguments.
            files: Put into the call's directory before it: relative name → content.
            retries: How often a call is made again that failed by no fault of its own.

        Raises:
            InvalidRequest: function or arguments cannot be sent.
            FunctionPoolNotFound: there is no such pool.
        """
        code = self._functions.packed(self.local, self.options)
        item = make_item(code, args, kwargs or {}, files)
        return await self._functions.one(code, item, self.options, retries=retries)

    def map(
        self,
        items: Iterable[Any],
        *,
        star: bool = False,
        ordered: bool = True,
        return_errors: bool = False,
        retries: int = RETRIES_DEFAULT,
    ) -> AsyncIterator[Any]:
        """Call it for each item. See ``AsyncFunctions.map``."""
        return self._functions.map(
            self, items, star=star, ordered=ordered, return_errors=return_errors, retries=retries
        )


class AsyncFunctions:
    """Calls of functions in workers: ``client.fn``.

    ::

        @client.fn(timeout_s=5)
        def grade(answer: str) -> float: ...

        score = await grade("42")
        async for score in grade.map(answers): ...

    Attributes:
        pools: What the calls run on.
    """

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport
        self.pools = AsyncFunctionPools(transport)
        self._packed: dict[tuple[Any, Pack], dict[str, Any]] = {}

    @overload
    def __call__(self, function: Callable[P, R], /) -> AsyncFunction[P, R]: ...

    @overload
    def __call__(self, **options: Any) -> Callable[[Callable[P, R]], AsyncFunction[P, R]]: ...

    # mypy takes `**options` for one that could be `function` by name, which it cannot be.
    def __call__(  # type: ignore[misc]
        self, function: Callable[..., Any] | None = None, /, **options: Any
    ) -> Any:
        """Make a function whose calls run in workers; as a decorator as well.

        Args:
            function: Made by ``def``. None: this makes a decorator.
            options: As the fields of ``CallOptions``.
        """
        made = _options(options)
        if function is not None:
            return AsyncFunction(self, function, made)
        return lambda function: AsyncFunction(self, function, made)

    async def run(
        self,
        source: str,
        *,
        entry: str | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes | str] | None = None,
        check: bool = True,
        retries: int = RETRIES_DEFAULT,
        **options: Any,
    ) -> CallResult:
        """Run Python text in a worker.

        Args:
            source: A program. Without ``entry`` its value is that of the variable ``result``.
            entry: A function in it that is called.
            args: Its arguments.
            kwargs: Its named arguments.
            files: Put into the call's directory before it: relative name → content.
            check: Raise what the program came to. False: see ``error`` of the result.
            retries: How often a call is made again that failed by no fault of its own.
            options: As the fields of ``CallOptions``.

        Raises:
            FunctionRaised, FunctionTimeout, FunctionOutOfMemory, FunctionDiskFull,
                FunctionCrashed, FunctionResultInvalid, FunctionResultTooLarge: what the program
                came to. ``details`` has its output and traceback.
            FunctionPoolNotFound, FunctionPoolUnusable: there is no such pool, or its workers
                cannot serve.
            FunctionQueueFull, QuotaExceeded, NodeFull: no room now.
            FunctionWorkerLost: the worker ended meanwhile, more often than ``retries``.
        """
        code = {"source": source, "entry": entry}
        item = make_item(code, args, kwargs or {}, files)
        result = await self.one(code, item, _options(options), retries=retries)
        if check:
            result.get()
        return result

    async def map(
        self,
        function: AsyncFunction[..., Any] | Callable[..., Any],
        items: Iterable[Any],
        *,
        star: bool = False,
        ordered: bool = True,
        return_errors: bool = False,
        retries: int = RETRIES_DEFAULT,
        **options: Any,
    ) -> AsyncIterator[Any]:
        """Call a function once for each item; its values as they come.

        Args:
            function: One made by ``client.fn``, or a plain one.
            items: Its argument in each call; any number. Read as far as is needed.
            star: Each item is a tuple of arguments.
            ordered: Values in the order of the items. False: pairs of index and value, as the
                calls are over.
            return_errors: Hand out an ``OpendsecError`` in place of a value. False: raise the
                first.
            retries: How often a call is made again that failed by no fault of its own. A call
                whose worker was lost may have done something before.
            options: As the fields of ``CallOptions``; of a plain function.

        Raises:
            As ``run``.
        """
        if isinstance(function, AsyncFunction):
            made = replace(function.options, **options) if options else function.options
            function = function.local
        else:
            made = _options(options)
        code = self.packed(function, made)
        calls = (make_item(code, item if star else (item,), {}, None) for item in items)
        kept: dict[int, CallResult] = {}
        following = 0
        outcomes = self.outcomes(code, calls, made, retries=retries)
        try:
            async for result in outcomes:
                if result.error is not None and not return_errors:
                    raise result.error
                if not ordered:
                    yield result.index, result.value if result.error is None else result.error
                    continue
                kept[result.index] = result
                while following in kept:
                    ready = kept.pop(following)
                    following += 1
                    yield ready.value if ready.error is None else ready.error
        finally:
            # The server gives up what is not over.
            await outcomes.aclose()

    # --- below the surface ------------------------------------------------------

    def packed(self, function: Callable[..., Any], options: CallOptions) -> dict[str, Any]:
        """The function as it is sent. Taken apart once."""
        place = (function, options.pack)
        code = self._packed.get(place)
        if code is None:
            code = self._packed[place] = _fn_pack.pack_function(function, options.pack)
        return code

    async def one(
        self, code: dict[str, Any], item: dict[str, Any], options: CallOptions, *, retries: int
    ) -> CallResult:
        """What came of a single call."""
        found: CallResult | None = None
        async for result in self.outcomes(code, [item], options, retries=retries):
            found = result
        if found is None:
            raise FunctionWorkerLost("The server sent no outcome.")
        return found

    async def outcomes(
        self,
        code: dict[str, Any],
        items: Iterable[dict[str, Any]],
        options: CallOptions,
        *,
        retries: int,
    ) -> AsyncGenerator[CallResult, None]:
        """What came of each item, as it comes, with its index."""
        first = 0
        for chunk in _chunks(items):
            open_items = dict(enumerate(chunk, first))
            first += len(chunk)
            tries = 0
            while open_items:
                again: dict[int, CallResult] = {}
                failure: OpendsecError | None = None
                numbers = list(open_items)
                lines = self._lines(code, list(open_items.values()), options)
                try:
                    async for line in lines:
                        index = numbers[line.index]
                        result = result_of(line, index, unpickle=options.result == "pickle")
                        if _worth_another(result.error) and tries < retries:
                            again[index] = result
                            continue
                        open_items.pop(index)
                        yield result
                except OpendsecError as exc:
                    if not _worth_another(exc) or tries >= retries:
                        raise
                    failure = exc
                finally:
                    await lines.aclose()
                tries += 1
                if again or failure is not None:
                    await _concurrency.sleep(RETRY_PAUSE_S * tries)
                elif open_items:
                    raise FunctionWorkerLost("The server sent no outcome for some of the calls.")

    async def _lines(
        self, code: dict[str, Any], items: list[dict[str, Any]], options: CallOptions
    ) -> AsyncGenerator[CallLine, None]:
        body = {"code": code, "items": items, **options.body()}
        lines = await open_lines(
            self._transport,
            "POST",
            "/v1/functions/map",
            CallLine,
            body=body,
            repeat=Repeat.IF_UNSENT,
        )
        async with lines:
            async for line in lines:
                if not 0 <= line.index < len(items):
                    raise FunctionWorkerLost("The server sent an outcome of no call.")
                yield line


def make_item(
    code: dict[str, Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    files: Mapping[str, bytes | str] | None,
) -> dict[str, Any]:
    """What is different in each call."""
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise InvalidRequest("The arguments of a call are a list or tuple.")
    item = _fn_pack.pack_arguments(code, args, dict(kwargs))
    if files:
        item["files"] = {
            name: base64.b64encode(
                content.encode() if isinstance(content, str) else bytes(content)
            ).decode()
            for name, content in files.items()
        }
    return item


def _options(options: dict[str, Any]) -> CallOptions:
    try:
        made = CallOptions(**options)
    except TypeError as exc:
        raise InvalidRequest(f"No such option of a call: {exc}") from None
    return replace(made, env=dict(made.env or {}), collect=tuple(made.collect))


def _chunks(items: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    chunk: list[dict[str, Any]] = []
    size = 0
    for item in items:
        length = len(msgspec.json.encode(item))
        if chunk and (len(chunk) >= ITEMS_PER_REQUEST or size + length > BYTES_PER_REQUEST):
            yield chunk
            chunk, size = [], 0
        chunk.append(item)
        size += length
    if chunk:
        yield chunk


def _worth_another(error: OpendsecError | None) -> bool:
    return error is not None and error.retryable and error.fault != "user"


def _pool_path(name: str) -> str:
    if not name:
        raise InvalidRequest("The name of the pool is empty.")
    return f"/v1/functions/pools/{quote(name, safe='')}"
