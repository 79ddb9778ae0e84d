# SPDX-License-Identifier: AGPL-3.0-only
"""Images."""

from __future__ import annotations

import shutil
import tarfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opendsec import (
    ImageNotFound,
    InvalidRequest,
    OpendsecError,
    ProgramNotFound,
    ReadyCheck,
    Sandbox,
    SandboxStartFailed,
    StartTimeout,
)
from opendsec_server.images.tests.registries import Entry, make_layout, tar_of

from .kit import OCI_DIR, Bench, Maker

BUSYBOX = Path("/bin/busybox")
APPLETS = ("sh", "cat", "ls", "id", "pwd", "env", "echo", "rm", "mkdir", "sleep", "grep", "httpd")
PASSWD = "root:x:0:0::/root:/bin/sh\napp:x:1234:1234::/home/app:/bin/sh\n"


def _link(name: str, target: str) -> Entry:
    return Entry(name, kind=tarfile.SYMTYPE, link=target)


def _text(name: str, text: str, **options: Any) -> Entry:
    return Entry(name, text.encode(), **options)


def _program(name: str) -> Entry:
    return Entry(name, BUSYBOX.read_bytes(), mode=0o755)


def _shell() -> list[Entry]:
    return [_program("bin/busybox"), *(_link(f"bin/{name}", "busybox") for name in APPLETS)]


@pytest.fixture(scope="module")
def images(bench: Bench) -> Iterator[dict[str, str]]:
    """References of images, by what they are."""
    if bench.server is None:
        pytest.skip("needs the server's machine; the suite was given a URL")
    if not BUSYBOX.exists():
        pytest.skip("busybox-static is not installed")
    shutil.rmtree(OCI_DIR, ignore_errors=True)
    OCI_DIR.mkdir(mode=0o755)
    shell = tar_of(_shell())
    app = [
        _text("etc/passwd", PASSWD),
        Entry("srv", kind=tarfile.DIRTYPE, mode=0o755, uid=1234),
        _text("srv/page", "served"),
    ]
    wanted: dict[str, tuple[list[bytes], dict[str, Any]]] = {
        "shell": ([shell], {}),
        "scratch": ([tar_of([_program("busybox")])], {}),
        "app": (
            [shell, tar_of(app)],
            {
                "User": "app",
                "WorkingDir": "/srv",
                "Env": ["PATH=/bin", "COLOUR=red", "SIZE=3"],
                "Entrypoint": ["/bin/sh", "-c"],
                "Cmd": ["echo $COLOUR > /srv/colour; exec httpd -f -p 127.0.0.1:8080"],
                "ExposedPorts": {"8080/tcp": {}},
            },
        ),
        "workspace": (
            [tar_of([_text("tools/a", "a1"), _text("tools/b", "b1"), _text("old/x", "x1")])],
            {"Env": ["COLOUR=blue"]},
        ),
        "toolkit": (
            [
                tar_of(
                    [
                        _text("tools/a", "a2"),
                        _text("tools/.wh.b", ""),
                        _text("old/.wh..wh..opq", ""),
                        _text("old/y", "y2"),
                    ]
                )
            ],
            {},
        ),
        "fails": ([shell], {"Cmd": ["/bin/sh", "-c", "echo out of luck; exit 7"]}),
    }
    for name, (layers, config) in wanted.items():
        make_layout(OCI_DIR / name, layers, config)
    yield {name: f"oci:{OCI_DIR / name}" for name in wanted}
    shutil.rmtree(OCI_DIR)


def _sh(sandbox: Sandbox, script: str) -> str:
    """What a script prints; the image need not have more of a shell than this."""
    return sandbox.exec(["/bin/sh", "-c", script], check=True).stdout


def _made(bench: Bench, make: Maker, **wanted: Any) -> Any:
    """A sandbox; or None, when the backend properly refuses images."""
    if bench.can.disk_images:
        bench.refused(lambda: make(template="base", **wanted))
        return None
    return make(**wanted)


def test_an_image_with_a_shell_only(bench: Bench, make: Maker, images: dict[str, str]) -> None:
    sandbox = _made(bench, make, image=images["shell"])
    if sandbox is None:
        return
    seen = _sh(sandbox, "echo $((6 * 7)); id -u; pwd; cat /etc/resolv.conf")
    assert seen.splitlines()[:3] == ["42", "0", "/"]
    assert "nameserver" in seen
    sandbox.files.write("/deep/er/file", "content")
    assert sandbox.files.read("/deep/er/file") == b"content"
    assert sandbox.info().image.startswith("sha256:")
    # What clients call a shell is here the one that there is.
    done = sandbox.exec(["/bin/bash", "-l", "-c", "echo $0"], check=True)
    assert done.stdout == "/bin/sh\n"


def test_an_image_with_one_program(bench: Bench, make: Maker, images: dict[str, str]) -> None:
    sandbox = _made(bench, make, image=images["scratch"])
    if sandbox is None:
        return
    done = sandbox.exec(["/busybox", "echo", "from scratch"], check=True)
    assert done.stdout == "from scratch\n"
    with pytest.raises(ProgramNotFound, match="sh"):
        _sh(sandbox, "echo needs a shell")
    with pytest.raises(ProgramNotFound, match="no shell"):
        sandbox.exec(["/bin/bash", "-l", "-c", "echo needs a shell"])
    # No user file: root and numbers are users, names are not.
    for user in ("root", "1000"):
        sandbox.exec(["/busybox", "touch", f"/tmp/{user}"], user=user, check=True)
    with pytest.raises(OpendsecError, match="no such user"):
        sandbox.exec(["/busybox", "id"], user="user")


def test_environment_directory_and_user_of_an_image(
    bench: Bench, make: Maker, images: dict[str, str]
) -> None:
    sandbox = _made(bench, make, image=images["app"], env={"SIZE": "4"})
    if sandbox is None:
        return
    seen = _sh(sandbox, "id -un; pwd; echo $COLOUR $SIZE $PATH; ls")
    assert seen == "app\n/srv\nred 4 /bin\npage\n"
    saved = make.snapshot(sandbox, mode="filesystem")
    child = make(template=saved.snapshot_id)
    assert _sh(child, "id -un; pwd; echo $COLOUR") == "app\n/srv\nred\n"


def test_composed_layers(bench: Bench, make: Maker, images: dict[str, str]) -> None:
    layers = [images["workspace"], images["toolkit"]]
    sandbox = _made(bench, make, image=images["app"], layers=layers)
    if sandbox is None:
        return
    look = "cat /tools/a; ls /tools /old; cat /srv/page; echo $COLOUR; id -un; pwd"
    assert _sh(sandbox, look) == ("a2/old:\ny\n\n/tools:\na\nservedblue\napp\n/srv\n")
    other = make(image=images["app"], layers=layers[::-1])
    assert _sh(other, "cat /tools/a; ls /old") == "a1x\ny\n"
    on_base = make(layers=layers)
    look = "cat /tools/a /etc/debian_version > /dev/null && ls /old && id -un"
    assert _sh(on_base, look) == "y\nuser\n"


def test_pack_and_start_from_it(bench: Bench, make: Maker, images: dict[str, str]) -> None:
    if bench.can.disk_images:
        bench.refused(lambda: make().pack())
        return
    sandbox = make(image=images["app"])
    _sh(sandbox, "echo mine > /srv/mine; rm /srv/page; echo ls > /srv/.ash_history")
    name = f"packed-{uuid.uuid4().hex[:8]}"
    packed = sandbox.pack(name)
    assert packed.names == (f"{name}:latest",)
    key = uuid.uuid4().hex
    child = make(image=name, idempotency_key=key)
    assert _sh(child, "ls -A; cat mine; id -un") == "mine\nmine\napp\n"
    _sh(child, "echo more > more")
    squashed = child.pack(name, squash=True)
    assert len(squashed.layers) == 1
    # The key's first request has decided what the name means.
    assert make(image=name, idempotency_key=key).sandbox_id == child.sandbox_id
    newer = make(image=name)
    assert _sh(newer, "ls") == "mine\nmore\n"
    assert newer.exec(["id", "-un"], check=True).stdout == "app\n"
    older = make(image=packed.digest)
    assert _sh(older, "ls") == "mine\n"


def test_the_program_of_an_image(bench: Bench, make: Maker, images: dict[str, str]) -> None:
    if bench.can.disk_images:
        return
    ready = ReadyCheck(url="http://localhost:8080/page", timeout_s=60)
    wanted: dict[str, Any] = {"image": images["app"], "start_image": True, "ready": ready}
    for env, colour in (({}, "red"), ({"COLOUR": "green"}, "green")):
        sandbox = make(env=env, **wanted)
        assert _sh(sandbox, "cat /srv/colour") == f"{colour}\n"
        assert [process.cmd for process in sandbox.processes()] == ["/bin/sh"]
        child = make.fork(sandbox)[0]
        child.wait_for_port(8080, timeout_s=60)
        sandbox.pause(mode="filesystem")
        sandbox.resume()
        sandbox.wait_for_port(8080, timeout_s=1)


def test_a_program_that_does_not_come_up(bench: Bench, make: Maker, images: dict[str, str]) -> None:
    if bench.can.disk_images:
        return
    with pytest.raises(SandboxStartFailed, match=r"status 7.*out of luck") as failed:
        make(image=images["fails"], start_image=True, ready=ReadyCheck(port=1))
    assert failed.value.fault == "user"
    begun = time.monotonic()
    with pytest.raises(StartTimeout, match="port 1"):
        make(image=images["app"], start_image=True, ready=ReadyCheck(port=1, timeout_s=1))
    assert time.monotonic() - begun < 280


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        ({"image": f"oci:{OCI_DIR}/none"}, ImageNotFound),
        ({"image": "sha256:" + "0" * 64}, ImageNotFound),
        ({"image": "packed:other/name:latest"}, InvalidRequest),
        ({"image": "UPPER CASE"}, InvalidRequest),
        ({"image": "a" * 513}, InvalidRequest),
        ({"layers": ["x"] * 65}, InvalidRequest),
        ({"image": "shell", "start_image": True}, InvalidRequest),
        ({"start_image": True}, InvalidRequest),
        ({"image": "app", "ready": ReadyCheck(port=80)}, InvalidRequest),
        ({"image": "app", "template": "other"}, InvalidRequest),
        (
            {"image": "app", "start_image": True, "ready": ReadyCheck(url="http://far/")},
            InvalidRequest,
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_no_image(
    bench: Bench,
    make: Maker,
    images: dict[str, str],
    wanted: dict[str, Any],
    error: type[Exception],
) -> None:
    if bench.can.disk_images:
        return
    image = wanted.get("image")
    with pytest.raises(error):
        make(**{**wanted, **({"image": images[image]} if image in images else {})})
