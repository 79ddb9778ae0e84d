# SPDX-License-Identifier: Apache-2.0
"""docker-compose files: what is taken, what is refused and where, and hostile ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opendsec import InvalidRequest, NotSupported
from opendsec._compose import FILE_BYTES_MAX, Compose, read_compose
from opendsec._compose_values import interpolate

WHOLE = """\
version: "3.9"
name: shop
x-env: &env {MODE: "${MODE:-dev}", N: 3}
services:
  web:
    image: "python:${PY:-3.12}"
    entrypoint: ["python", "-m"]
    command: http.server ${PORT-8000}
    environment: {<<: *env, FROM_HERE: , DOLLAR: "a$$b", FLAG: true}
    env_file: [web.env, {path: missing.env, required: false}]
    depends_on: {db: {condition: service_healthy}, job: {condition: service_completed_successfully}}
    ports: ["8080:8000"]
    restart: always
    cpus: "${CPUS:-0.5}"
    mem_limit: 512m
    working_dir: /srv
    user: "1000"
  db:
    image: redis:7
    hostname: Store
    container_name: redis
    healthcheck: &check
      {test: [CMD, redis-cli, ping], interval: 1s, timeout: 3s, retries: 5, start_period: 1m30s}
    networks: {default: {aliases: [cache]}}
    expose: ["6379"]
    labels: [a=b]
    deploy: {resources: {limits: {memory: 1.5G, cpus: "2"}}}
  job:
    x-opendsec: {template: base, disk_mb: 64}
    command: "true"
    healthcheck: {disable: true}
  debug:
    image: busybox
    profiles: [debug]
"""


def read(tmp_path: Path, text: str, profiles: tuple[str, ...] = (), **environment: str) -> Compose:
    path = tmp_path / "compose.yml"
    path.write_text(text)
    return read_compose(path, environment=environment, profiles=profiles)


def test_a_whole_file(tmp_path: Path) -> None:
    (tmp_path / "web.env").write_text(
        "# comment\n\nexport FILE='from file'\nMODE=file\nX=1 # one\n"
    )
    (tmp_path / ".env").write_text("PORT=9000\nPY=3.11\n")
    found = read(tmp_path, WHOLE, PY="3.13", FROM_HERE="here")
    assert found.name == "shop"
    assert found.services == {
        "web": {
            "image": "python:3.13",
            "entrypoint": ["python", "-m"],
            "command": ["http.server", "9000"],
            "env": {
                "FILE": "from file",
                "MODE": "dev",
                "X": "1",
                "N": "3",
                "FROM_HERE": "here",
                "DOLLAR": "a$b",
                "FLAG": "true",
            },
            "depends_on": {"db": "healthy", "job": "completed"},
            "cpu": 0.5,
            "memory_mb": 512,
            "workdir": "/srv",
            "user": "1000",
        },
        "db": {
            "image": "redis:7",
            "healthcheck": {
                "test": ["redis-cli", "ping"],
                "interval_s": 1.0,
                "timeout_s": 3.0,
                "retries": 5,
                "start_period_s": 90.0,
            },
            "metadata": {"a": "b"},
            "memory_mb": 1536,
            "cpu": 2.0,
            "aliases": ["store", "redis", "cache"],
        },
        "job": {"template": "base", "disk_mb": 64, "command": ["true"]},
    }
    text = "\n".join(found.warnings)
    assert ":12: services.web.ports: " in text and ":13: services.web.restart: " in text
    assert "services.debug.profiles" in text and len(found.warnings) == 3
    assert set(read(tmp_path, WHOLE, profiles=("debug",)).services) == {"web", "db", "job", "debug"}


def test_networks(tmp_path: Path) -> None:
    same = "networks: {back: {internal: true}}\nservices:\n"
    one, two = "  a: {image: x, networks: [back]}\n", "  b: {image: x, networks: [back]}\n"
    found = read(tmp_path, same + one + two)
    assert found.services["a"] == {"image": "x", "network": {"internet": False}}
    with pytest.raises(NotSupported, match=r"services\.b\.networks.*one network"):
        read(tmp_path, same + one + "  b: {image: x}\n")
    with pytest.raises(InvalidRequest, match="no network `other`"):
        read(tmp_path, same + "  a: {image: x, networks: [other]}\n")


@pytest.mark.parametrize(
    ("service", "key", "line"),
    [
        ("volumes: [a:/b]", "volumes", 4),
        ("build: .", "build", 4),
        ("privileged: true", "privileged", 4),
        ("network_mode: host", "network_mode", 4),
        ("deploy: {replicas: 3}", "deploy.replicas", 4),
        ("deploy:\n      resources:\n        reservations: {devices: []}",
         "deploy.resources.reservations.devices", 6),
        ("secrets: [x]", "secrets", 4),
        ("extends: {service: b}", "extends", 4),
        ("healthcheck: {interval: 1s}", "healthcheck", 4),
        ("nonsense: 1", "nonsense", 4),
    ],
)  # fmt: skip
def test_what_there_is_not_is_refused_with_its_place(
    tmp_path: Path, service: str, key: str, line: int
) -> None:
    with pytest.raises(NotSupported) as caught:
        read(tmp_path, f"services:\n  a:\n    image: x\n    {service}\n")
    assert caught.value.details == {"key": f"services.a.{key}"}
    assert f"compose.yml:{line}: services.a.{key}: " in caught.value.message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no service"),
        ("[]", "must be a mapping"),
        ("services: [a", "compose.yml:1: no YAML"),
        ("services: {a: {image: x}, a: {image: y}}", "twice"),
        ("services: {a: {}}", "names no image"),
        ("services: {a_b: {image: x}}", "no DNS label"),
        ("services: {a: {image: [x]}}", "must be a text"),
        ("services: {a: {image: x, depends_on: [b]}}", "no service `b`"),
        ("services: {a: {image: x, depends_on: {a: {condition: x}}}}", "service_healthy"),
        ('services: {a: {image: "${X:?say which}"}}', "`X` is not set: say which"),
        ('services: {a: {image: "${X"}}', "without `}`"),
        ("services: {a: {image: x, mem_limit: much}}", "such as `512m`"),
        ("services: {a: {image: x, healthcheck: {test: x, interval: 5}}}", "duration"),
        ('services: {a: {image: x, command: "a \'b"}}', "No closing quotation"),
        ("services: {a: {image: x, env_file: no.env}}", "there is no file"),
        ("services: {a: {image: !!python/object:os.system x}}", "is not known"),
        ("name: Not A Label\nservices: {a: {image: x}}", "no DNS label"),
        ("x: &x [*x]", "too deep"),
        ("[" * 5_000, "nested too deeply"),
        ("a: \0", "no YAML"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(tmp_path, text)
    assert says in caught.value.message


def test_files_that_would_grow_without_bound(tmp_path: Path) -> None:
    bomb = "x-0: &a0 [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
        f"x-{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 20)
    )
    with pytest.raises(InvalidRequest, match="aliases written out"):
        read(tmp_path, bomb)
    with pytest.raises(InvalidRequest, match="larger than"):
        read(tmp_path, "#" * (FILE_BYTES_MAX + 1))
    (tmp_path / "compose.yml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        read_compose(tmp_path / "compose.yml")
    with pytest.raises(InvalidRequest, match="No such file"):
        read_compose(tmp_path / "none.yml")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("$A ${A} $$A", "1 1 $A"),
        ("${E:-d} ${E-d} ${N:-d} ${N-d}", "d  d d"),
        ("${E:+o}${A:+o}${E+p}${N+q}", "op"),
        ("${N:-${E:-${A}}x}", "1x"),
        ("${A:?no}", "1"),
    ],
)
def test_variables(text: str, found: str) -> None:
    values = {"A": "1", "E": ""}
    assert interpolate(text, values) == found


@pytest.mark.parametrize("text", ["$", "${}", "${A!b}", "${E:?}", "${" * 40 + "A" + "}" * 40])
def test_bad_variables(text: str) -> None:
    values: dict[str, Any] = {"A": "1", "E": ""}
    with pytest.raises(ValueError, match=r"\$|set|deep|variable"):
        interpolate(text, values)
