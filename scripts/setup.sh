#!/usr/bin/env bash
# Installs what is missing: packages of Debian or Ubuntu, and the Python packages of requirements.txt (.venv).
# Where nothing is missing it takes milliseconds and says nothing. `make setup`, `demo` and `test` call it.
# SKIP_PACKAGES=1 leaves the system's packages to you. SETUP_PYTHON=PROGRAM: the Python to make .venv with.
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

apt_install() {
    apt_get install -y --no-install-recommends --no-remove "$@"
}

read_options() {
    local folder
    while [ $# -gt 0 ]; do
        case $1 in
            --offline | --prefix) [ -n "${2:-}" ] || fail "$1 names no folder: write $1 DIR" ;;
            *) fail "unknown option $1: there are --offline DIR and --prefix DIR" ;;
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
        fail "$offline was not made by scripts/fetch_offline_deps.sh: name a folder that was"
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
        fail "this is not Debian or Ubuntu: install your system's equivalents of these packages, then run\
 again with SKIP_PACKAGES=1: ${packages[*]} redis-server"
    fi
    for package in "${packages[@]}"; do
        is_installed "$package" || missing+=("$package")
    done
    command -v redis-server >/dev/null || redis=(redis-server)   # the tests start one of their own
    if [ $((${#missing[@]} + ${#redis[@]})) -eq 0 ]; then return; fi
    if ! as_root true 2>/dev/null; then
        [ -z "$offline" ] || fail "packages are missing and sudo does not work: unpack them with --prefix DIR"
        fail "packages are missing and sudo does not work: as root, apt-get install ${missing[*]} ${redis[*]}\
; or unpack them, as dev/building.md says"
    fi

    echo "updating the package lists"
    run_or_fail "apt-get update failed: check the network and the package sources" apt_get update
    if [ ${#missing[@]} -gt 0 ]; then
        echo "installing ${missing[*]}"
        run_or_fail "apt-get install failed: correct that, then run again (a package that would have to be\
 removed is yours to remove; SKIP_PACKAGES=1 leaves all packages to you)" apt_install "${missing[@]}"
    fi
    if [ ${#redis[@]} -gt 0 ]; then
        # The package also starts a service. That may fail (no init system, port in use): only the program is needed.
        echo "installing redis-server, without its service on port 6379: the tests start servers of their own"
        apt_install redis-server >/dev/null 2>&1 || true
        command -v redis-server >/dev/null || fail "no redis-server: install it with apt-get to see why"
        if [ -d /run/systemd/system ]; then
            run_or_fail "redis-server's service runs: systemctl disable --now redis-server" \
                as_root systemctl disable --now redis-server
        fi
    fi
}

# The first that is new enough.
find_python() {
    local python pythons=(/usr/bin/python3 python3)
    [ -z "${SETUP_PYTHON:-}" ] || pythons=("$SETUP_PYTHON")
    for python in "${pythons[@]}"; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    fail "no Python environment: install Python 3.10 or newer with venv, or name it in SETUP_PYTHON"
}

# Also false after an upgrade of the system's Python, which then looks for packages in another folder.
has_packages() {
    .venv/bin/python -c 'from importlib.util import find_spec; find_spec("numpy").name' 2>/dev/null
}

# An environment that works is kept. If it has no made_from, make setup has not created it.
install_python_packages() {
    local made_from=.venv/requirements.sha256 wanted python
    local pip=(-m pip --disable-pip-version-check) source=() without_pip=()
    wanted=$(sha256sum <requirements.txt)
    if [ "$(cat $made_from 2>/dev/null)" = "$wanted" ] && has_packages; then return; fi
    if [ -n "$offline" ]; then
        pip=("$(echo "$offline"/wheels/pip-*.whl)/pip")   # Python runs it as it is
        source=(--no-index --find-links "$offline/wheels")
        without_pip=(--without-pip)
    fi
    if ! .venv/bin/python "${pip[@]}" --version >/dev/null 2>&1; then
        [ ! -e .venv ] || [ -e $made_from ] ||
            fail "pip does not run in .venv, which make setup has not made: rename it, then run again"
        python=$(find_python)
        rm -rf .venv
        mkdir .venv
        touch $made_from
        run_or_fail "no Python environment: install python3-venv" "$python" -m venv "${without_pip[@]}" .venv
    elif [ ! -e $made_from ]; then
        echo "make setup did not make this .venv: its packages are kept"
    fi
    echo "installing into .venv: $(grep -o "^[a-z_0-9]*" requirements.txt | uniq | tr '\n' ' ')"
    run_or_fail "pip failed: correct that, or check the network, then run again" \
        .venv/bin/python "${pip[@]}" install --quiet "${source[@]}" -r requirements.txt
    echo "$wanted" >$made_from
}

install_cuda_headers() {
    local home=${CUDA_HOME:-/usr/local/cuda} nccl
    for nccl in "$home/include/nccl.h" /usr/include/nccl.h; do
        if [ -e "$home/include/cublasLt.h" ] && [ -e "$nccl" ]; then return; fi
    done
    if [ -n "$offline" ] && [ ! -e .venv/cuda ]; then cp -r "$offline/cuda" .venv/cuda; fi
    if .venv/bin/python scripts/fetch_cuda_headers.py .venv/cuda; then return; fi
    [ -z "${CI:-}" ] || exit 2
    echo "without these headers make test stops at the tests of CUDA kernels; make and make demo need none" >&2
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
