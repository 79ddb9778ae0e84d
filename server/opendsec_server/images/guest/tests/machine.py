# SPDX-License-Identifier: AGPL-3.0-only
"""A microVM for tests: plain QEMU under emulation, and a small client of its agent."""

from __future__ import annotations

import base64
import http.client
import json
import re
import socket
import subprocess
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from opendsec_server.images.guest import GuestImage, guest_cmdline

ACCESS = "access-token"
CONTROL = "control-token-0123456789"
BOOT_TIMEOUT_S = 180.0
CALL_TIMEOUT_S = 240.0
_QEMU = "qemu-system-x86_64"


def clock_words() -> str:
    """An emulated guest cannot measure its processor on a busy host and then hangs, so it is told
    the rate. Empty where the host does not say it."""
    found = re.search(r"cpu MHz\s*:\s*([\d.]+)", Path("/proc/cpuinfo").read_text())
    return f" tsc_early_khz={int(float(found.group(1)) * 1000)} tsc=reliable" if found else ""


def make_disk(path: Path, size: str = "1G") -> None:
    """An empty ext4 disk."""
    with path.open("xb") as file:
        file.truncate(0)
    subprocess.run(["truncate", "-s", size, path], check=True, timeout=20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m0", path], check=True, timeout=60)


def make_layer(path: Path, files: dict[str, str]) -> None:
    """A layer of a few files."""
    tree = path.with_suffix(".tree")
    for name, text in files.items():
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    command: list[str | Path] = ["mkfs.erofs", "-d0", "--all-root", path, tree]
    subprocess.run(command, check=True, timeout=60, capture_output=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Machine:
    """A running microVM."""

    guest: GuestImage
    folder: Path
    layers: list[Path]
    memory_mb: int = 256
    words: str = ""
    with_modules: bool = True
    serials: bool = True
    announced_layers: int | None = None
    boot_s: float = 0.0
    control: str = CONTROL
    access: str = ACCESS
    port: int = field(default_factory=_free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def console(self) -> str:
        """What the guest has printed."""
        try:
            return (self.folder / "console").read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def start(self) -> None:
        """Start QEMU; the guest boots meanwhile."""
        drives = [(f"layer{index}", path, True) for index, path in enumerate(self.layers)]
        drives.append(("disk", self.folder / "disk.ext4", False))
        if self.with_modules:
            drives.append(("modules", self.guest.modules_erofs, True))
        layers = len(self.layers) if self.announced_layers is None else self.announced_layers
        line = guest_cmdline(layers=layers, modules=self.with_modules) + clock_words()
        command = [
            _QEMU, "-M", "microvm,rtc=on", "-accel", "tcg", "-cpu", "max",
            "-m", str(self.memory_mb), "-nodefaults", "-no-user-config", "-no-reboot",
            "-display", "none", "-serial", f"file:{self.folder / 'console'}",
            "-kernel", str(self.guest.kernel), "-initrd", str(self.guest.initramfs),
            "-append", f"{line} {self.words}".strip(),
            "-netdev", "user,id=n0,net=169.254.0.0/24,host=169.254.0.22,"
            "dhcpstart=169.254.0.100,dns=169.254.0.1,restrict=on,"
            f"hostfwd=tcp:127.0.0.1:{self.port}-169.254.0.21:49983",
            "-device", "virtio-net-device,netdev=n0,mac=02:00:a9:fe:00:15",
        ]  # fmt: skip
        for number, (serial, path, read_only) in enumerate(drives):
            access = "on" if read_only else "off"
            how = f"id=d{number},file={path},if=none,format=raw,readonly={access}"
            command += ["-drive", how]
            name = f",serial={serial}" if self.serials else ""
            command += ["-device", f"virtio-blk-device,drive=d{number}{name}"]
        (self.folder / "console").unlink(missing_ok=True)
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def boot(self) -> None:
        """Start, and wait until the agent answers."""
        began = time.monotonic()
        self.start()
        assert self.process is not None
        while time.monotonic() < began + BOOT_TIMEOUT_S:
            code = self.process.poll()
            assert code is None, f"QEMU ended with {code}:\n{self.console}"
            # Before that QEMU takes connections that lead nowhere.
            if "opendsec-agent" in self.console:
                self.boot_s = time.monotonic() - began
                assert self.call("GET", "/health")[0] == 204
                return
            time.sleep(0.02)
        raise AssertionError(f"the guest did not come up:\n{self.console}")

    def wait_for_end(self) -> str:
        """Wait until QEMU ends by itself; returns what the guest printed."""
        assert self.process is not None
        try:
            code = self.process.wait(BOOT_TIMEOUT_S)
        except subprocess.TimeoutExpired as exc:
            raise AssertionError(f"the guest went on:\n{self.console}") from exc
        assert code == 0
        return self.console

    def kill(self) -> None:
        """End QEMU as a lost host would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(20)
            self.process = None

    def call(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, bytes]:
        """One request with both tokens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=CALL_TIMEOUT_S)
        try:
            every = {
                "X-Opendsec-Control": self.control,
                "X-Access-Token": self.access,
                "Content-Type": "application/json",
                "Connection": "close",
                **{name.replace("_", "-"): value for name, value in headers.items()},
            }
            connection.request(method, path, body, every)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def init(self, **changes: object) -> int:
        """Tell the agent who it is; returns the status."""
        body: dict[str, object] = {
            "accessToken": ACCESS,
            "controlToken": CONTROL,
            "sandboxId": "itest",
            "templateId": "base",
            "hostname": "itest",
            "defaultUser": "user",
            "envVars": {"GREETING": "hello"},
            "timestamp": timestamp(0),
            **changes,
        }
        status = self.call("POST", "/init", json.dumps(body).encode())[0]
        if status == 204:
            self.control, self.access = str(body["controlToken"]), str(body["accessToken"])
        return status

    def run(self, command: str, user: str = "user") -> str:
        """Standard output and error of a shell command that ends well."""
        message: dict[str, Any] = {
            "process": {"cmd": "/bin/bash", "args": ["-c", command]},
            "stdin": False,
        }
        raw = json.dumps(message).encode()
        status, answer = self.call(
            "POST",
            "/process.Process/Start",
            b"\0" + len(raw).to_bytes(4) + raw,
            Content_Type="application/connect+json",
            Authorization="Basic " + base64.b64encode(f"{user}:".encode()).decode(),
        )
        assert status == 200, answer
        text, end = b"", None
        while answer:
            length = int.from_bytes(answer[1:5])
            frame = json.loads(answer[5 : 5 + length])
            answer = answer[5 + length :]
            assert "error" not in frame, frame
            event = frame.get("event", {})
            for source in ("stdout", "stderr"):
                text += base64.b64decode(event.get("data", {}).get(source, ""))
            end = event.get("end", end)
        assert end is not None
        assert end["status"] == "exit status 0", (end, text)
        return text.decode()


def timestamp(offset_s: float) -> str:
    """Now, or a while from now, as ``/init`` takes it."""
    moment = datetime.now(UTC) + timedelta(seconds=offset_s)
    return moment.isoformat().replace("+00:00", "Z")
