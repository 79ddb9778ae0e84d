# SPDX-License-Identifier: AGPL-3.0-only
# Steps shared by install.sh, tests/run and .ci/run. Sourced, not run.

RUST_MIN=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' dataplane/Cargo.toml)
PYTHON_MIN="3.11"
# What a node needs at run time, by Debian and Ubuntu package name.
RUNTIME_PACKAGES="crun nftables iproute2 btrfs-progs e2fsprogs erofs-utils mmdebstrap ca-certificates procps kmod lz4 zstd skopeo"
# MicroVMs and full VMs need an emulator on x86-64; other machines run containers.
[ "$(uname -m)" != x86_64 ] || RUNTIME_PACKAGES="$RUNTIME_PACKAGES qemu-system-x86 qemu-utils ovmf seabios xorriso"
# What a build from a clone needs besides Rust.
BUILD_PACKAGES="gcc libc6-dev python3-venv curl"
# What tests build disk images with, and a registry of container images with an image to put in.
TEST_PACKAGES="mtools dosfstools fdisk docker-registry busybox-static"

STEP_STARTED=$(date +%s)

step() { # step TEXT: a line of progress, with the time since the start
  printf '[%4ds] %s\n' "$(($(date +%s) - STEP_STARTED))" "$*" >&2
}

fail() { # fail TEXT: what is wrong and what to do; ends the script
  printf 'error: %s\n' "$*" >&2
  exit 1
}

version_at_least() { # version_at_least HAVE WANT
  [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]
}

require_root() {
  [ "$(id -u)" = 0 ] || fail "run this as root: sudo $0"
}

install_packages() { # install_packages PACKAGE...: those that are missing, by apt
  command -v apt-get >/dev/null || fail "no apt-get here; install the equivalents of: $*"
  local missing=()
  for package in "$@"; do
    dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed ||
      missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return 0
  step "installing packages: ${missing[*]}"
  local log
  log=$(mktemp)
  if ! { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q \
    --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    fail "apt-get could not install: ${missing[*]} (log: $log)"
  fi
  rm -f "$log"
}

require_rust() {
  local have=""
  # sudo hides root's own Rust: rustup adds it to PATH in login shells only.
  # shellcheck disable=SC1091
  if [ -r "$HOME/.cargo/env" ]; then . "$HOME/.cargo/env"; fi
  if command -v cargo >/dev/null; then have=$(cargo --version | awk '{print $2}'); fi
  if [ -z "$have" ] || ! version_at_least "$have" "$RUST_MIN"; then
    fail "building from a clone needs Rust $RUST_MIN or newer (found: ${have:-none}).
  Install it for root with rustup (https://rustup.rs):
    curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sudo -H sh -s -- -y --profile minimal
  and run this again."
  fi
}

find_python() { # prints a python3 that is new enough
  local candidate
  # The system's first: one in root's home (pyenv, uv) could not be run by other users.
  for candidate in /usr/bin/python3 python3 python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null &&
      version_at_least "$("$candidate" -c 'import platform; print(platform.python_version())')" \
        "$PYTHON_MIN"; then
      command -v "$candidate"
      return 0
    fi
  done
  fail "Python $PYTHON_MIN or newer is needed: apt-get install python3 python3-venv"
}

make_venv() { # make_venv FOLDER LOCKFILE: a virtual environment with exactly the locked packages
  local folder=$1 lock=$2 python
  python=$(find_python)
  [ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
  step "installing Python packages from $(basename "$lock")"
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check \
    --require-hashes -r "$lock"
}

build_rust_wheels() { # build_rust_wheels VENV OUT: wheels of our Rust programs
  local maturin out target first
  maturin=$(realpath "$1")/bin/maturin
  out=$(realpath -m "$2")
  target=$(realpath -m dataplane/target)
  # Side by side, since the last step of each, optimising at link time, keeps one processor busy.
  # In folders of their own, since cargo does not build two things in one.
  CARGO_TARGET_DIR="$target/beside" build_wheels_of "$maturin" "$out" agent layer ram &
  first=$!
  build_wheels_of "$maturin" "$out" edge lazy
  wait "$first"
}

build_wheels_of() { # build_wheels_of MATURIN OUT CRATE...
  local maturin=$1 out=$2 crate
  shift 2
  for crate in "$@"; do
    step "building opendsec-$crate (Rust, a few minutes the first time)"
    # From its own folder: only there cargo finds the settings that make it static.
    (cd "dataplane/$crate" && "$maturin" build --quiet --locked --out "$out")
  done
}

require_static() { # require_static PROGRAM...: they must run in any image, on any host
  local program
  for program in "$@"; do
    if ldd "$program" 2>/dev/null | grep -q '=>'; then
      fail "$program is not static: see dataplane/.cargo/config.toml"
    fi
  done
}
