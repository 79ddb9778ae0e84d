# SPDX-License-Identifier: AGPL-3.0-only
"""Makes the template ``base`` from the host distribution's own packages.

mmdebstrap, then one EROFS layer. Made once: what decides the content is hashed into a recipe, and
an image of the same recipe is never built again. Users in a sandbox find: bash, python3 with venv
and pip, git, curl, sudo, node; user ``user`` (uid 1000) with passwordless sudo; UTF-8.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opendsec_server.config import Config, ConfigError
from opendsec_server.contract.images import ImageConfig

from .apt_sources import Distribution, UnsupportedHost, host_distribution, mirror_lines
from .certificates import host_authorities, install_missing
from .convert import EROFS_OPTIONS, fix_build_time
from .store import Image, ImageNotFound, ImageStore

BASE = "base"
CONFIG = ImageConfig(user="user")
RECIPE_VERSION = 1
"""Raise it when something below changes what comes out."""

PACKAGES = (
    "bash", "ca-certificates", "coreutils", "curl", "git", "iproute2", "less", "nodejs",
    "openssh-client", "procps", "python-is-python3", "python3", "python3-pip", "python3-venv",
    "sudo", "unzip", "xz-utils",
)  # fmt: skip
"""npm is not among them: Debian splits it into some 400 packages, which would double the image."""

_LEFT_OUT = (
    "/usr/share/man/*", "/usr/share/info/*", "/usr/share/doc/*", "/usr/share/locale/*",
)  # fmt: skip

_BUILD_TIMEOUT_S = 1_800
_HEARTBEAT_S = 5.0

Progress = Callable[[str], None]

_SET_UP = r"""set -e
useradd --create-home --uid 1000 --shell /bin/bash user
passwd --delete user >/dev/null
echo 'user ALL=(ALL:ALL) NOPASSWD: ALL' > /etc/sudoers.d/user
chmod 0440 /etc/sudoers.d/user
echo 'LANG=C.UTF-8' > /etc/default/locale
cat >> /etc/profile <<'EOF'

# Login shells get the user's own settings in both files.
export LANG="${LANG:-C.UTF-8}"
if [ -f "$HOME/.bashrc" ]; then . "$HOME/.bashrc"; fi
if [ -f "$HOME/.profile" ]; then . "$HOME/.profile"; fi
EOF
# A sandbox is thrown away; pip need not protect the system from its user.
rm -f /usr/lib/python3*/EXTERNALLY-MANAGED
mkdir -p /.opendsec
touch /.opendsec/agent
: > /etc/machine-id
rm -f /etc/hostname /etc/resolv.conf /var/lib/dbus/machine-id
"""

_TRUST = r"""set -e
update-ca-certificates >/dev/null
printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n' > /etc/pip.conf
cat > /etc/profile.d/trusted-authorities.sh <<'EOF'
# Programs that bring their own list of authorities are told to use the system's.
export SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
export REQUESTS_CA_BUNDLE=/etc/ssl/certs/ca-certificates.crt
export NODE_EXTRA_CA_CERTS=/etc/ssl/certs/ca-certificates.crt
EOF
"""


class BaseBuildError(ConfigError):
    """The template could not be built. The message names the step and the log file."""


def ensure_base(config: Config, progress: Progress = lambda _line: None) -> Image:
    """Have the template ``base``; build it if it is not there. Blocks: seconds or minutes.

    Args:
        config: ``state_dir``, ``extra_ca_certs``.
        progress: Gets one line for people at each stage, and a sign of life in between.

    ``OPENDSEC_IMAGE_CACHE`` names a directory where builds are kept and found again by any
    instance; without it they are kept in ``state_dir`` alone.

    Raises:
        BaseBuildError: it is not there and cannot be built.
    """
    store = ImageStore(config.state_path / "images")
    try:
        distribution = host_distribution()
    except UnsupportedHost as exc:
        return _existing_or_raise(store, exc)
    recipe = _recipe(distribution, config)
    with store.locked():
        have = _same_recipe(store, recipe)
        if have is not None:
            if store.names().get(BASE) != have.digest:
                store.name(have.digest, [BASE])
            return have
        cache_path = os.environ.get("OPENDSEC_IMAGE_CACHE")
        if cache_path is None:
            return _build_into(store, distribution, config, recipe, progress)
        cache = ImageStore(Path(cache_path))
        with cache.locked():
            have = _same_recipe(cache, recipe)
            if have is None:
                have = _build_into(cache, distribution, config, recipe, progress)
        return store.add(
            BASE,
            cache.layer_path(have.layers[0]),
            config=CONFIG,
            recipe=recipe,
            description=have.description or "",
            at=have.created_at,
        )


def _existing_or_raise(store: ImageStore, exc: UnsupportedHost) -> Image:
    try:
        return store.find(BASE)
    except ImageNotFound:
        raise BaseBuildError(str(exc)) from exc


def _same_recipe(store: ImageStore, recipe: str) -> Image | None:
    """By recipe and not by name: a cache may serve servers of several versions."""
    return next((image for image in store.all() if image.recipe == recipe), None)


def _authorities(config: Config) -> list[str]:
    extra = None if config.extra_ca_certs is None else Path(config.extra_ca_certs)
    try:
        return host_authorities(extra)
    except OSError as exc:
        raise BaseBuildError(f"cannot read extra_ca_certs: {exc}") from exc


def _recipe(distribution: Distribution, config: Config) -> str:
    parts = {
        "version": RECIPE_VERSION,
        "machine": platform.machine(),
        "distribution": [distribution.family, distribution.codename],
        "mirrors": mirror_lines(distribution),
        "packages": PACKAGES,
        "left_out": _LEFT_OUT,
        "layer": EROFS_OPTIONS,
        "set_up": [_SET_UP, _TRUST],
        "authorities": _authorities(config),
        "proxy": _apt_proxies(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _apt_proxies() -> list[str]:
    """Proxy settings of the host's apt; those of the environment are inherited anyway."""
    try:
        dump = subprocess.run(
            ["apt-config", "dump"], capture_output=True, text=True, check=False, timeout=30
        ).stdout
    except OSError:
        return []
    lines = (line.strip().rstrip(";") for line in dump.splitlines())
    return [line for line in lines if line.lower().startswith("acquire::") and "::proxy" in
            line.lower() and not line.endswith('""')]  # fmt: skip


class _Build:
    """One build: a scratch directory, a log, and a clock."""

    def __init__(self, scratch: Path, log_path: Path, progress: Progress) -> None:
        self.root = scratch / "root"
        self.layer = scratch / "layer.erofs"
        self._log_path = log_path
        self._progress = progress
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """One line for people, with the time since the start."""
        self._progress(f"[{time.monotonic() - self._began:4.0f} s] {text}")

    def run(self, what: str, argv: list[str], stdin: str = "") -> None:
        """Run one step; its output goes to the log, and a sign of life to the reader.

        Raises:
            BaseBuildError: it failed, is missing, or took too long.
        """
        self.say(what)
        ended = threading.Event()
        watcher = threading.Thread(target=self._heartbeat, args=(what, ended), daemon=True)
        watcher.start()
        try:
            with self._log_path.open("a") as log:
                log.write(f"\n--- {what}: {' '.join(argv)}\n")
                log.flush()
                done = subprocess.run(
                    argv,
                    input=stdin,
                    text=True,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    check=False,
                    timeout=_BUILD_TIMEOUT_S,
                    env={**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"},
                )
        except FileNotFoundError as exc:
            raise BaseBuildError(
                f"{argv[0]} is not installed. Install the packages mmdebstrap and erofs-utils."
            ) from exc
        except subprocess.TimeoutExpired as exc:
            raise BaseBuildError(
                f"{what}: not finished after {_BUILD_TIMEOUT_S} s; see {self._log_path}"
            ) from exc
        finally:
            ended.set()
            watcher.join()
        if done.returncode != 0:
            raise BaseBuildError(
                f"{what} failed (exit status {done.returncode}); see {self._log_path}\n"
                + self._log_tail()
            )

    def _heartbeat(self, what: str, ended: threading.Event) -> None:
        while not ended.wait(_HEARTBEAT_S):
            stage = self._log_tail(1)
            self.say(f"{what}: {stage[3:].rstrip('.')}" if stage.startswith("I: ") else what)

    def _log_tail(self, lines: int = 8) -> str:
        text = self._log_path.read_text(errors="replace")
        return "\n".join(text.strip().splitlines()[-lines:])


def _build_into(
    store: ImageStore,
    distribution: Distribution,
    config: Config,
    recipe: str,
    progress: Progress,
) -> Image:
    log_path = store.root / "build-base.log"
    log_path.write_text("")
    # Programs of the distribution drop to other users and must still reach the directory.
    scratch = Path(tempfile.mkdtemp(prefix="opendsec-base-", dir="/var/tmp"))
    scratch.chmod(0o755)
    try:
        build = _Build(scratch, log_path, progress)
        progress(f"Making the template {BASE} from {distribution.pretty} (once; about a minute)")
        _bootstrap(build, distribution)
        _customise(build, config)
        _pack(build)
        build.say("storing the layer")
        image = store.add(
            BASE,
            build.layer,
            config=CONFIG,
            recipe=recipe,
            description=f"{distribution.pretty}, {platform.machine()}",
            at=time.time(),
        )
        build.say(f"template {BASE} is ready: {store.layer_bytes(image.layers[0]) >> 20} MiB")
        return image
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _bootstrap(build: _Build, distribution: Distribution) -> None:
    # A half-built image is thrown away, so nothing need be safe against a power cut.
    options = ["--dpkgopt", "force-unsafe-io"]
    for proxy in _apt_proxies():
        options += ["--aptopt", proxy]
    for pattern in _LEFT_OUT:
        options += ["--dpkgopt", f"path-exclude={pattern}"]
    build.run(
        "downloading and installing packages",
        [
            "mmdebstrap", "--mode=root", "--variant=minbase", "--include", ",".join(PACKAGES),
            "--aptopt", 'Acquire::Languages "none"', "--aptopt", 'APT::Install-Recommends "false"',
            *options, distribution.codename, str(build.root), "-",
        ],
        stdin="\n".join(mirror_lines(distribution)) + "\n",
    )  # fmt: skip


def _customise(build: _Build, config: Config) -> None:
    chroot: list[Any] = ["chroot", str(build.root), "/bin/sh", "-c"]
    build.run("making the user and the settings", [*chroot, _SET_UP])
    added = install_missing(_authorities(config), build.root)
    if added:
        build.run(f"trusting {added} certificate authorities of the host", [*chroot, _TRUST])


def _pack(build: _Build) -> None:
    """Files keep their times: Python takes a compiled module for stale when its source's is not
    the one that was noted, and would compile it anew at every start."""
    build.run("compressing", ["mkfs.erofs", *EROFS_OPTIONS, str(build.layer), str(build.root)])
    fix_build_time(build.layer)
