#!/usr/bin/env bash
# SPDX-License-Identifier: AGPL-3.0-only
# Installs OpenDsec on this machine from this clone, starts the server, and runs code in a sandbox.
# Running it again upgrades: running sandboxes are left alone.
#
#   sudo ./install.sh              install, start, show a first sandbox
#   sudo ./install.sh --no-start   install only
#   sudo ./install.sh --uninstall  remove the server, its sandboxes and its files
#   ./install.sh --help            print this
#
# Installs to $PREFIX (/opt/opendsec), with links in $BIN (/usr/local/bin).
set -euo pipefail
SELF=$(realpath "$0")
cd "$(dirname "$SELF")"
. scripts/lib.sh

PREFIX=${PREFIX:-/opt/opendsec}
BIN=${BIN:-/usr/local/bin}
UNIT=opendsecd.service

has_systemd() { [ -d /run/systemd/system ]; }

usage() { sed -n '3,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$SELF"; }

uninstall() {
  local linked
  linked=$(readlink "$BIN/opendsecd" || true)
  if [ -n "$linked" ] && [ "$linked" != "$PREFIX/venv/bin/opendsecd" ]; then
    fail "$BIN/opendsecd is $linked, not in $PREFIX: set PREFIX to where it was installed"
  fi
  if has_systemd; then systemctl disable --now "$UNIT" 2>/dev/null || true; fi
  if [ -x "$PREFIX/venv/bin/opendsecd" ]; then
    "$PREFIX/venv/bin/opendsecd" purge --yes --images
  fi
  rm -rf "$PREFIX" "$BIN/opendsec" "$BIN/opendsecd" "/etc/systemd/system/$UNIT" /var/lib/opendsec \
    /run/opendsec
  step "removed (settings in /etc/opendsec are kept)"
}

install_server() {
  # shellcheck disable=SC2086  # the lists are split on purpose
  install_packages $RUNTIME_PACKAGES $BUILD_PACKAGES
  require_rust
  mkdir -p "$PREFIX/wheels"
  make_venv "$PREFIX/venv" requirements/install.txt
  rm -f "$PREFIX"/wheels/*.whl
  build_rust_wheels "$PREFIX/venv" "$PREFIX/wheels"
  step "installing the server, the SDK and the command line"
  "$PREFIX/venv/bin/python" -m pip wheel --quiet --no-deps --no-build-isolation \
    --wheel-dir "$PREFIX/wheels" ./server ./sdk/python
  "$PREFIX/venv/bin/python" -m pip install --quiet --no-deps --force-reinstall \
    "$PREFIX"/wheels/*.whl
  require_static "$PREFIX"/venv/bin/opendsec-{agent,edge,layer,lazy,ram}
  ln -sf "$PREFIX/venv/bin/opendsec" "$PREFIX/venv/bin/opendsecd" "$BIN/"
}

start_server() {
  step "starting the server (the first start builds the template \"base\": about a minute)"
  if has_systemd; then
    sed "s|/opt/opendsec|$PREFIX|" deploy/systemd/$UNIT >/etc/systemd/system/$UNIT
    systemctl daemon-reload
    systemctl enable --quiet "$UNIT"
    systemctl restart "$UNIT"
  else
    "$BIN/opendsecd" stop >/dev/null 2>&1 || true
  fi
  # With systemd the unit is starting already: this waits for it and shows what it is doing.
  "$BIN/opendsecd" start
}

first_sandbox() {
  step "creating a sandbox and running code in it"
  "$BIN/opendsec" run -c '
import os, platform
print("Hello from", platform.node(), "- Python", platform.python_version(), "- uid", os.getuid())
print("sum of squares below 1000:", sum(i * i for i in range(1000)))
'
  printf '\nTo use it from E2B code, set:\n'
  "$BIN/opendsec" env
  printf '\nNext: opendsec --help, opendsec doctor, docs/quickstart.md\n'
}

case "${1:-}" in
  -h | --help)
    usage
    exit
    ;;
  "" | --no-start | --uninstall) require_root ;;
  *) fail "unknown option $1 (./install.sh --help lists them)" ;;
esac
case "${1:-}" in
  --uninstall) uninstall ;;
  --no-start) install_server ;;
  "")
    install_server
    start_server
    first_sandbox
    ;;
esac
