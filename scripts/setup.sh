#!/usr/bin/env bash
# Installs what is missing: packages of Debian or Ubuntu, and the Python packages of requirements.txt (.venv).
# Where nothing is missing it takes milliseconds and says nothing. `make setup`, `demo` and `test` call it.
# SKIP_PACKAGES=1 leaves the system's packages to you.
#     --offline DIR   without a network, from what scripts/fetch_offline_deps.sh has fetched
#     --prefix DIR    with that and without root: libraries are unpacked there (then make DEPS_HOME=DIR)
set -euo pipefail
called_from=$PWD
cd "$(dirname "$0")/.."

source scripts/packages.sh  # toolchain, libraries, extras, services, release()
packages=("${toolchain[@]}" "${libraries[@]}" "${extras[@]}")
offline=   # folder of scripts/fetch_offline_deps.sh
prefix=    # folder to unpack libraries into
lists=     # apt's, where it is offline
apt_options=()

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
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -q "${apt_options[@]}" "$@" </dev/null
}

read_options() {
    local folder
    while [ $# -gt 0 ]; do
        case $1 in
            --offline | --prefix) [ -n "${2:-}" ] || fail "$1 names no folder: write $1 DIR" ;;
            *) fail "no option $1: there are --offline DIR and --prefix DIR" ;;
        esac
        folder=$(cd "$called_from" && realpath --canonicalize-missing -- "$2")
        if [ "$1" = --offline ]; then offline=$folder; else prefix=$folder; fi
        shift 2
    done
    [ -z "$prefix" ] || [ -n "$offline" ] || fail "--prefix is for --offline: give both"
}

# From now on apt knows that folder and nothing else.
use_offline_folder() {
    command -v dpkg >/dev/null || fail "--offline is for Debian and Ubuntu: make says what else is missing"
    [ -e "$offline/SHA256SUMS" ] ||
        fail "$offline is no folder of scripts/fetch_offline_deps.sh: name the one that is"
    (cd "$offline" && sha256sum --quiet --check SHA256SUMS >/dev/null 2>&1) ||
        fail "$offline is damaged: copy it again"
    [ "$(release)" = "$(cat "$offline/release")" ] ||
        fail "$offline is for $(cat "$offline/release"), this is $(release): fetch on a machine like this one"
    lists=$(mktemp -d)
    trap 'rm -rf "$lists"' EXIT
    mkdir -p "$lists/of_folder/partial"
    echo "deb [trusted=yes] file:${offline// /%20}/packages ./" >"$lists/sources.list"
    apt_options=(-o Dir::Etc::SourceList="$lists/sources.list" -o Dir::Etc::SourceParts=/dev/null
                 -o Dir::State::Lists="$lists/of_folder" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache=
                 -o APT::Sandbox::User=root)
}

# Without root: the libraries, which a system with a compiler and Python may lack.
unpack_libraries() {
    local package made_from="$prefix/libraries.sha256" wanted
    command -v g++ >/dev/null || fail "there is no g++: load a compiler, then run again"
    wanted=$(sha256sum <"$offline/SHA256SUMS")
    if [ "$(cat "$made_from" 2>/dev/null)" = "$wanted" ]; then return; fi
    echo "unpacking libraries into $prefix"
    mkdir -p "$prefix"
    while read -r package; do
        run_or_fail "$package cannot be unpacked into $prefix: give a folder with room that can be written" \
            dpkg-deb --extract "$offline/packages/$package.deb" "$prefix"
    done <"$offline/packages/libraries.txt"
    echo "$wanted" >"$made_from"
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
        [ -z "$offline" ] || fail "packages are missing and there is no sudo: unpack them with --prefix DIR"
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
    local python=/usr/bin/python3 made_from=.venv/requirements.sha256 wanted pip
    wanted=$(sha256sum <requirements.txt)
    if [ "$(cat $made_from 2>/dev/null)" = "$wanted" ] && .venv/bin/python -c '' 2>/dev/null; then return; fi
    [ -x "$python" ] || python=python3
    echo "making .venv: $(grep -o "^[a-z_0-9]*" requirements.txt | uniq | tr '\n' ' ')"
    if [ -n "$offline" ]; then
        run_or_fail "no Python environment: install Python 3.10 or newer" \
            "$python" -m venv --clear --without-pip .venv
        pip=$(echo "$offline"/wheels/pip-*.whl)   # Python runs it as it is
        run_or_fail "pip failed: correct that, then run again" \
            .venv/bin/python "$pip/pip" install --quiet --no-index \
            --find-links "$offline/wheels" -r requirements.txt
    else
        run_or_fail "no Python environment: install Python 3.10 or newer with venv" \
            "$python" -m venv --clear .venv
        run_or_fail "pip failed: check the network, then run again" \
            .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
    fi
    echo "$wanted" >$made_from
}

install_cuda_headers() {
    local home=${CUDA_HOME:-/usr/local/cuda} nccl
    for nccl in "$home/include/nccl.h" /usr/include/nccl.h; do
        if [ -e "$home/include/cublasLt.h" ] && [ -e "$nccl" ]; then return; fi
    done
    if [ -n "$offline" ] && [ ! -e .venv/cuda ]; then cp -r "$offline/cuda" .venv/cuda; fi
    .venv/bin/python scripts/fetch_cuda_headers.py .venv/cuda || exit 2
}

read_options "$@"
if [ -n "$offline" ]; then use_offline_folder; fi
if [ -n "$prefix" ]; then
    unpack_libraries
elif [ -z "${SKIP_PACKAGES:-}" ]; then
    install_packages
fi
install_python_packages
install_cuda_headers
