# SPDX-License-Identifier: Apache-2.0
"""A docker-compose file as services of a group.

What the file asks for and cannot have here is refused, with its place in the file; what makes no
difference is told as a warning.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ._compose_document import Document, Place
from ._compose_values import read_env_file
from ._errors import InvalidRequest, NotSupported

FILE_BYTES_MAX = 1024 * 1024
OWN_KEY = "x-opendsec"
OWN_KEYS = ("template", "backend", "disk_mb", "network")


class Compose(msgspec.Struct, kw_only=True, frozen=True):
    """What a file asks for.

    Attributes:
        services: As ``client.groups.create`` takes them.
        warnings: What of it has no effect here.
    """

    name: str | None
    services: dict[str, dict[str, Any]]
    warnings: tuple[str, ...] = ()


def read_compose(
    path: Path,
    *,
    environment: Mapping[str, str] | None = None,
    profiles: Sequence[str] = (),
) -> Compose:
    """Read a file.

    Args:
        path: Which.
        environment: For ``${…}``. None: this program's. A ``.env`` beside the file counts below.
        profiles: Services of these profiles too.

    Raises:
        InvalidRequest: it cannot be read, or is no compose file. The message names the line.
        NotSupported: it asks for what there is not here. The message names key and line.
    """
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as exc:
        raise InvalidRequest(f"{path}: {exc.strerror or exc}") from exc
    if len(data) > FILE_BYTES_MAX:
        raise InvalidRequest(f"{path}: larger than {FILE_BYTES_MAX} bytes")
    values = dict(read_env_file(path.parent / ".env")) if (path.parent / ".env").is_file() else {}
    values.update(os.environ if environment is None else environment)
    document = Document(path, values)
    return _File(document, document.read(data), profiles).compose()


_Reader = Callable[["_Service", Place, Any], None]

_IGNORED = {
    "attach": "",
    "cpu_shares": "processors are shared by `cpus`",
    "init": "the guest agent is the init process of each sandbox",
    "logging": "output is kept by the sandbox; read it with `opendsec group logs`",
    "mem_reservation": "",
    "memswap_limit": "",
    "oom_score_adj": "",
    "platform": "images are those of the node's processor",
    "pull_policy": "an image that is there is used; `opendsec pull` sees a moved tag",
    "shm_size": "",
    "stdin_open": "",
    "stop_grace_period": "",
    "stop_signal": "",
    "tty": "",
}
"""Keys of a service that have no effect, and why that does no harm."""
_UNITS = {
    "": 1,
    "b": 1,
    "k": 1024,
    "kb": 1024,
    "m": 1024**2,
    "mb": 1024**2,
    "g": 1024**3,
    "gb": 1024**3,
}
_BYTES_RE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
_DURATION_RE = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m|h)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_CONDITIONS = {
    "service_started": "started",
    "service_healthy": "healthy",
    "service_completed_successfully": "completed",
}
_NAME_RE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


class _File:
    """The whole file."""

    def __init__(self, document: Document, value: Any, profiles: Sequence[str]) -> None:
        self.document = document
        self.profiles = set(profiles)
        self.warnings: dict[str, None] = {}
        self.top = self.mapping((), value)
        self.networks: dict[str, dict[str, Any]] = {}

    def compose(self) -> Compose:
        for key in self.top:
            if key in ("include", "secrets", "configs", "models"):
                raise self.unsupported((key,))
            if key not in (
                "version",
                "name",
                "services",
                "networks",
                "volumes",
            ) and not key.startswith("x-"):
                raise self.unsupported((key,), "it is no key of a compose file")
        if "volumes" in self.top:
            self.warn(("volumes",), "no volume is made: a service that uses one is refused")
        for name, network in self.mapping(("networks",), self.top.get("networks")).items():
            self.networks[name] = self._network(("networks", name), network)
        found = self.mapping(("services",), self.top.get("services"))
        active = {name: value for name, value in found.items() if self._active(name, value)}
        if not active:
            raise InvalidRequest(f"{self.document.at(('services',))}: there is no service")
        services = {name: _Service(self, name, value) for name, value in active.items()}
        self._one_network(services)
        for service in services.values():
            for other in service.depends_on:
                if other not in services:
                    place = ("services", service.name, "depends_on")
                    raise InvalidRequest(f"{self.document.at(place)}: no service `{other[:64]}`")
        return Compose(
            name=self._name(),
            services={name: service.body() for name, service in services.items()},
            warnings=tuple(self.warnings),
        )

    def _name(self) -> str | None:
        name = self.top.get("name")
        if name is None:
            return None
        text = self.text(("name",), name)
        if _NAME_RE.fullmatch(text) is None:
            raise InvalidRequest(f"{self.document.at(('name',))}: `{text[:64]}` is no DNS label")
        return text

    def _active(self, name: str, value: Any) -> bool:
        place = ("services", name, "profiles")
        profiles = self.texts(place, self.mapping(place[:-1], value).get("profiles"))
        if not profiles or self.profiles & set(profiles):
            return True
        self.warn(place, "the service is left out: its profile was not asked for")
        return False

    def _network(self, place: Place, value: Any) -> dict[str, Any]:
        network = self.mapping(place, value)
        for key in network:
            if key == "external" and network[key] in (False, None):
                continue
            if key in ("driver", "name", "internal", "labels", "attachable"):
                if key == "driver" and network[key] not in ("bridge", "overlay", "default", None):
                    raise self.unsupported((*place, key))
                continue
            raise self.unsupported((*place, key))
        return network

    def _one_network(self, services: Mapping[str, _Service]) -> None:
        """Services that are to be apart cannot be: a group is one network."""
        first, *others = services.values()
        for other in others:
            if set(other.networks) != set(first.networks):
                raise self.unsupported(
                    ("services", other.name, "networks"),
                    f"all services of a group are on one network, and `{first.name}` is on others",
                )

    # --- values -------------------------------------------------------------

    def unsupported(self, place: Place, why: str = "there is nothing like it here") -> NotSupported:
        return NotSupported(
            f"{self.document.at(place)}: {why}",
            remediation="Remove it, or run this service elsewhere.",
            details={"key": ".".join(place)},
        )

    def wrong(self, place: Place, what: str) -> InvalidRequest:
        return InvalidRequest(f"{self.document.at(place)}: must be {what}")

    def warn(self, place: Place, why: str) -> None:
        self.warnings[f"{self.document.at(place)}: has no effect" + (f": {why}" if why else "")] = (
            None
        )

    def note(self, place: Place, what: str) -> None:
        self.warnings[f"{self.document.at(place)}: {what}"] = None

    def mapping(self, place: Place, value: Any) -> dict[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.wrong(place, "a mapping")
        return value

    def text(self, place: Place, value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self.wrong(place, "a text")
        return str(value)

    def texts(self, place: Place, value: Any) -> list[str]:
        if value is None:
            return []
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list):
            raise self.wrong(place, "a list")
        return [self.text((*place, str(n)), item) for n, item in enumerate(value)]

    def pairs(self, place: Place, value: Any) -> dict[str, str | None]:
        """A mapping, or a list of ``NAME=value``."""
        if isinstance(value, list):
            found: dict[str, str | None] = {}
            for text in self.texts(place, value):
                name, equals, rest = text.partition("=")
                found[name] = rest if equals else None
            return found
        mapped = self.mapping(place, value).items()
        return {
            key: None
            if item is None
            else _word(item)
            if isinstance(item, bool)
            else self.text((*place, key), item)
            for key, item in mapped
        }

    def seconds(self, place: Place, value: Any) -> float:
        text = self.text(place, value)
        parts = _DURATION_RE.findall(text)
        if not parts or "".join(map("".join, parts)) != text:
            raise self.wrong(place, "a duration such as `1m30s`")
        return sum(float(number) * _SECONDS[unit] for number, unit in parts)

    def mebibytes(self, place: Place, value: Any) -> int:
        match = _BYTES_RE.fullmatch(self.text(place, value).lower())
        if match is None or match[2] not in _UNITS:
            raise self.wrong(place, "a size such as `512m`")
        return math.ceil(float(match[1]) * _UNITS[match[2]] / 1024**2)

    def number(self, place: Place, value: Any) -> float:
        try:
            return float(self.text(place, value))
        except ValueError:
            raise self.wrong(place, "a number") from None

    def argv(self, place: Place, value: Any) -> list[str]:
        """As compose splits it: without a shell."""
        if not isinstance(value, str):
            return self.texts(place, value)
        try:
            return shlex.split(value)
        except ValueError as exc:
            raise InvalidRequest(f"{self.document.at(place)}: {exc}") from None


class _Service:
    """One service of the file."""

    def __init__(self, file: _File, name: str, value: Any) -> None:
        self.file = file
        self.name = name
        self.depends_on: dict[str, str] = {}
        self.networks: dict[str, Any] = {"default": None}
        self._aliases: dict[str, None] = {}
        self._env: dict[str, str] = {}
        self._body: dict[str, Any] = {}
        self._files: dict[str, str] = {}
        place: Place = ("services", name)
        if _NAME_RE.fullmatch(name) is None:
            raise InvalidRequest(
                f"{file.document.at(place)}: `{name[:64]}` is no DNS label (`a-z`, `0-9`, `-`)"
            )
        fields = file.mapping(place, value)
        for key, item in fields.items():
            here = (*place, key)
            reader = _READERS.get(key)
            if key == OWN_KEY:
                self.own(here, item)
            if key.startswith("x-") or key == "profiles":
                continue
            if key in _IGNORED:
                file.warn(here, _IGNORED[key])
            elif reader is None:
                raise file.unsupported(here)
            elif item is not None:
                reader(self, here, item)
        if "image" not in self._body and "template" not in self._body:
            raise InvalidRequest(f"{file.document.at(place)}: it names no image")

    def body(self) -> dict[str, Any]:
        """As the API takes it."""
        body = dict(self._body)
        env = {**self._files, **self._env}
        if env:
            body["env"] = env
        if self.depends_on:
            body["depends_on"] = self.depends_on
        self._aliases.pop(self.name, None)
        if self._aliases:
            body["aliases"] = list(self._aliases)
        used = [self.file.networks.get(name, {}) for name in self.networks]
        if used and all(network.get("internal") for network in used):
            body["network"] = {"internet": False}
        return body

    # --- keys ---------------------------------------------------------------

    def own(self, place: Place, value: Any) -> None:
        """What docker has not: taken as it is."""
        for key, item in self.file.mapping(place, value).items():
            if key not in OWN_KEYS:
                raise self.file.unsupported((*place, key), f"only {', '.join(OWN_KEYS)}")
            self._body[key] = item

    def image(self, place: Place, value: Any) -> None:
        self._body["image"] = self.file.text(place, value)

    def build(self, place: Place, value: Any) -> None:
        raise self.file.unsupported(
            place, "nothing is built here; build a template or push an image first, and name it"
        )

    def command(self, place: Place, value: Any) -> None:
        self._body["command"] = self.file.argv(place, value)

    def entrypoint(self, place: Place, value: Any) -> None:
        self._body["entrypoint"] = self.file.argv(place, value)

    def environment(self, place: Place, value: Any) -> None:
        for key, text in self.file.pairs(place, value).items():
            # Without a value: the caller's, if there is one.
            found = self.file.document.values.get(key) if text is None else text
            if found is not None:
                self._env[key] = found

    def env_file(self, place: Place, value: Any) -> None:
        items = value if isinstance(value, list) else [value]
        for number, item in enumerate(items):
            here = (*place, str(number))
            required = True
            if isinstance(item, dict):
                required = item.get("required", True) is not False
                item = item.get("path")
            path = self.file.document.path.parent / self.file.text(here, item)
            if not path.is_file():
                if required:
                    raise InvalidRequest(f"{self.file.document.at(here)}: there is no file {path}")
                continue
            self._files.update(read_env_file(path))

    def depends(self, place: Place, value: Any) -> None:
        if isinstance(value, list):
            self.depends_on = dict.fromkeys(self.file.texts(place, value), "started")
            return
        for other, item in self.file.mapping(place, value).items():
            fields = self.file.mapping((*place, other), item)
            condition = fields.get("condition", "service_started")
            if condition not in _CONDITIONS:
                raise self.file.wrong((*place, other, "condition"), " or ".join(_CONDITIONS))
            self.depends_on[other] = _CONDITIONS[condition]
            for key in fields:
                if key == "required" and fields[key] is False:
                    raise self.file.unsupported((*place, other, key))
                if key == "restart" and fields[key]:
                    self.file.warn((*place, other, key), "nothing is started again")

    def healthcheck(self, place: Place, value: Any) -> None:
        fields = self.file.mapping(place, value)
        test = fields.get("test")
        if fields.get("disable") is True or test in ("NONE", ["NONE"]):
            return
        if test is None:
            raise self.file.unsupported(place, "health checks of images are not known; give `test`")
        if isinstance(test, str):
            command: str | list[str] = test
        else:
            kind, *rest = self.file.texts((*place, "test"), test) or [""]
            if kind == "CMD-SHELL" and len(rest) == 1:
                command = rest[0]
            elif kind == "CMD" and rest:
                command = rest
            else:
                raise self.file.wrong((*place, "test"), "a text, or a list after CMD or CMD-SHELL")
        # As compose has them.
        check: dict[str, Any] = {
            "test": command,
            "interval_s": 30.0,
            "timeout_s": 30.0,
            "retries": 3,
        }
        for key in ("interval", "timeout", "start_period"):
            if fields.get(key) is not None:
                check[f"{key}_s"] = self.file.seconds((*place, key), fields[key])
        if fields.get("retries") is not None:
            check["retries"] = int(self.file.number((*place, "retries"), fields["retries"]))
        for key in fields:
            if key == "start_interval":
                self.file.warn((*place, key), "until failures count it is run every second")
            elif key not in ("test", "interval", "timeout", "start_period", "retries", "disable"):
                raise self.file.unsupported((*place, key))
        self._body["healthcheck"] = check

    def alias(self, place: Place, value: Any) -> None:
        self._aliases[self.file.text(place, value).lower()] = None

    def on_networks(self, place: Place, value: Any) -> None:
        if isinstance(value, list):
            self.networks = dict.fromkeys(self.file.texts(place, value))
        else:
            self.networks = self.file.mapping(place, value)
        for name, item in self.networks.items():
            if name != "default" and name not in self.file.networks:
                raise InvalidRequest(f"{self.file.document.at(place)}: no network `{name[:64]}`")
            for key, more in self.file.mapping((*place, name), item).items():
                here = (*place, name, key)
                if key == "aliases":
                    for alias in self.file.texts(here, more):
                        self._aliases[alias.lower()] = None
                elif key in ("priority", "gw_priority"):
                    self.file.warn(here, "")
                else:
                    raise self.file.unsupported(here)

    def working_dir(self, place: Place, value: Any) -> None:
        self._body["workdir"] = self.file.text(place, value)

    def user(self, place: Place, value: Any) -> None:
        self._body["user"] = self.file.text(place, value)

    def cpus(self, place: Place, value: Any) -> None:
        self._body["cpu"] = self.file.number(place, value)

    def memory(self, place: Place, value: Any) -> None:
        self._body["memory_mb"] = self.file.mebibytes(place, value)

    def deploy(self, place: Place, value: Any) -> None:
        fields = self.file.mapping(place, value)
        for key, item in fields.items():
            here = (*place, key)
            if key == "replicas":
                self.scale(here, item)
            elif key == "resources":
                self._resources(here, self.file.mapping(here, item))
            elif key in ("restart_policy", "update_config", "rollback_config", "labels", "mode"):
                self.file.warn(here, "")
            else:
                raise self.file.unsupported(here)

    def _resources(self, place: Place, fields: dict[str, Any]) -> None:
        for key, item in fields.items():
            if key == "reservations":
                for inner in self.file.mapping((*place, key), item):
                    if inner == "devices":
                        raise self.file.unsupported((*place, key, inner))
                self.file.warn((*place, key), "limits decide")
                continue
            if key != "limits":
                raise self.file.unsupported((*place, key))
            for inner, limit in self.file.mapping((*place, key), item).items():
                here = (*place, key, inner)
                if inner == "cpus":
                    self.cpus(here, limit)
                elif inner == "memory":
                    self.memory(here, limit)
                else:
                    raise self.file.unsupported(here)

    def labels(self, place: Place, value: Any) -> None:
        pairs = self.file.pairs(place, value)
        self._body["metadata"] = {key: text or "" for key, text in pairs.items()}

    def restart(self, place: Place, value: Any) -> None:
        if value not in ("no", False):
            self.file.warn(
                place, "a program that ends is not started again; the group is `degraded`"
            )

    def scale(self, place: Place, value: Any) -> None:
        if self.file.number(place, value) != 1:
            raise self.file.unsupported(place, "a service is one sandbox")

    def ports(self, place: Place, value: Any) -> None:
        if value:
            self.file.note(
                place,
                "nothing is bound on the server's own addresses; every port is reached through it, "
                "as `<port>-<sandbox id>.<domain>`",
            )

    def nothing(self, place: Place, value: Any) -> None:
        """Every port is open to the others anyway."""

    def privileged(self, place: Place, value: Any) -> None:
        if value is not False:
            raise self.file.unsupported(place)


_READERS: dict[str, _Reader] = {
    "build": _Service.build,
    "command": _Service.command,
    "container_name": _Service.alias,
    "cpus": _Service.cpus,
    "depends_on": _Service.depends,
    "deploy": _Service.deploy,
    "entrypoint": _Service.entrypoint,
    "env_file": _Service.env_file,
    "environment": _Service.environment,
    "expose": _Service.nothing,
    "healthcheck": _Service.healthcheck,
    "hostname": _Service.alias,
    "image": _Service.image,
    "labels": _Service.labels,
    "mem_limit": _Service.memory,
    "networks": _Service.on_networks,
    "ports": _Service.ports,
    "privileged": _Service.privileged,
    "restart": _Service.restart,
    "scale": _Service.scale,
    "user": _Service.user,
    "working_dir": _Service.working_dir,
}


def _word(value: bool) -> str:
    return "true" if value else "false"
