#!/usr/bin/env bash
# Installs what is missing: packages of Debian or Ubuntu, and the Python packages of requirements.txt (.venv).
# Where nothing is missing it takes milliseconds and says nothing. `make setup`, `demo` and `test` call it.
# SKIP_PACKAGES=1 leaves the system's packages to you.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(
    g++ make                                    # the build
    libdnnl-dev                                 # oneDNN: matmuls on the CPU
    libgloo-dev                                 # collectives over TCP
    libhiredis-dev libcli11-dev libxxhash-dev   # Redis, where processes meet; options; checksums
    libgtest-dev libboost-context-dev           # tests; the fibers that CUDA threads run as without a GPU
    bible-kjv                                   # the text of the demo
    python3-venv                                # text to tokens, plots, tests
)

fail() {
    echo "error: $1" >&2
    exit 2
}

# Runs a command, quiet unless it fails; then its output is shown and the set-up ends with message $1.
run_or_fail() {
    local message=$1 log
    shift
    log=$(mktemp)
    if ! "$@" >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        rm -f "$log"
        fail "$message"
    fi
    rm -f "$log"
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

apt_get() {
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -q "$@" </dev/null
}

is_installed() {
    [ "$(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

install_packages() {
    local missing=() redis=() package
    if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
        fail "this is not Debian or Ubuntu: install what these packages hold your system's way, then run\
 again with SKIP_PACKAGES=1: ${packages[*]} redis-server"
    fi
    for package in "${packages[@]}"; do
        is_installed "$package" || missing+=("$package")
    done
    command -v redis-server >/dev/null || redis=(redis-server)   # the tests start one of their own
    if [ $((${#missing[@]} + ${#redis[@]})) -eq 0 ]; then return; fi
    if [ "$(id -u)" -ne 0 ] && ! command -v sudo >/dev/null; then
        fail "packages are missing and there is no sudo: as root, apt-get install ${missing[*]} ${redis[*]}"
    fi

    echo "updating the package lists"
    run_or_fail "apt-get update failed: check the network and the package sources" apt_get update
    if [ ${#missing[@]} -gt 0 ]; then
        echo "installing ${missing[*]}"
        run_or_fail "apt-get install failed: correct that, then run again" \
            apt_get install -y --no-install-recommends "${missing[@]}"
    fi
    if [ ${#redis[@]} -gt 0 ]; then
        # The package also starts a service. That may fail (no init system, port in use): the program counts.
        echo "installing redis-server, without its service on port 6379: the tests start servers of their own"
        apt_get install -y --no-install-recommends redis-server >/dev/null 2>&1 || true
        command -v redis-server >/dev/null || fail "no redis-server: install it with apt-get to see why"
        if [ -d /run/systemd/system ]; then
            run_or_fail "redis-server's service runs: systemctl disable --now redis-server" \
                as_root systemctl disable --now redis-server
        fi
    fi
}

install_python_packages() {
    local python=/usr/bin/python3 made_from=.venv/requirements.sha256 wanted
    wanted=$(sha256sum <requirements.txt)
    if [ "$(cat $made_from 2>/dev/null)" = "$wanted" ] && .venv/bin/python -c '' 2>/dev/null; then return; fi
    [ -x "$python" ] || python=python3
    echo "making .venv: $(grep -o "^[a-z_0-9]*" requirements.txt | uniq | tr '\n' ' ')"
    run_or_fail "no Python environment: install Python 3.10 or newer with venv" \
        "$python" -m venv --clear .venv
    run_or_fail "pip failed: check the network, then run again" \
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
    echo "$wanted" >$made_from
}

if [ -z "${SKIP_PACKAGES:-}" ]; then install_packages; fi
install_python_packages
for header in cublasLt.h nccl.h; do
    if [ ! -e "${CUDA_HOME:-/usr/local/cuda}/include/$header" ]; then
        .venv/bin/python scripts/fetch_cuda_headers.py .venv/cuda || exit 2
        break
    fi
done
