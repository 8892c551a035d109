#!/usr/bin/env bash
# Fetches all that a machine without a network needs to build and test diloco.c, on a machine that has one and
# runs the same release of Debian or Ubuntu. Needs no root.
#
#     scripts/fetch_offline_deps.sh DIR     then, where there is no network, what DIR/README says
#
# DIR/packages   packages that a minimal system lacks, with all they depend on, as a repository of apt's
# DIR/wheels     the Python packages of requirements.txt, and pip, for this release's Python
# DIR/cuda       headers of CUDA libraries, for the emulated build where there is no CUDA toolkit
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
source "$here/scripts/packages.sh"

fail() {
    echo "error: $1" >&2
    exit 2
}

[ $# -eq 1 ] || fail "give a folder: scripts/fetch_offline_deps.sh DIR"
command -v apt-get >/dev/null || fail "this is not Debian or Ubuntu: fetch on a machine with the target's release"
[ ! -e "$1" ] || fail "$1 already exists: remove it, or give another folder"
python=/usr/bin/python3
"$python" -c 'import venv, ensurepip' 2>/dev/null || fail "no $python with venv: apt-get install python3-venv"

target=$(realpath --canonicalize-missing -- "$1")
folder=$target.part   # renamed when it is whole
mkdir -p "$(dirname "$target")" 2>/dev/null || fail "$(dirname "$target") cannot be made: give another folder"
mkdir "$folder" 2>/dev/null ||
    fail "$folder cannot be made: remove what a fetch that was killed has left, or give another folder"
work=$(mktemp -d)
trap 'rm -rf "$work" "$folder"' EXIT
mkdir -p "$work/state/lists/partial" "$work/cache/archives/partial"
touch "$work/nothing_installed"

# apt with lists of its own and nothing installed: what it would install is then all that is needed.
apt() {
    command "$@" -q -o Dir::State="$work/state" -o Dir::State::status="$work/nothing_installed" \
        -o Dir::Cache="$work/cache" -o APT::Sandbox::User="$(id -un)" -o Debug::NoLocking=1
}

# The packages that file $1 lists and those named after it, with all that they depend on, sorted.
closure() {
    local packages
    mapfile -t packages <"$1"
    apt apt-get --simulate --no-install-recommends install "${packages[@]}" "${@:2}" |
        awk '/^Inst / { print $2 }' | sort -u
}

essential() {
    apt apt-cache dumpavail | awk -v RS= '/\n(Priority: required|Essential: yes)/ { print $2 }'
}

# One paragraph a package, as apt wants them in a repository.
index_of_packages() {
    local file
    for file in *.deb; do
        dpkg-deb --field "$file"
        printf 'Filename: ./%s\nSize: %s\nSHA256: %s\n\n' "$file" "$(stat --format=%s "$file")" \
            "$(sha256sum "$file" | cut -d' ' -f1)"
    done
}

fetch_packages() {
    local wanted file
    echo "updating apt's lists"
    apt apt-get update >"$work/log" 2>&1 ||
        fail "apt-get update failed: check the network ($(tail -n 1 "$work/log"))"
    # First a minimal system, then the toolchain, then the libraries, then the rest.
    essential >"$work/essential"
    closure "$work/essential" apt >"$work/minimal"
    closure "$work/minimal" "${toolchain[@]}" >"$work/with_toolchain"
    closure "$work/with_toolchain" "${libraries[@]}" >"$work/with_libraries"
    closure "$work/with_libraries" "${extras[@]}" "${services[@]}" >"$work/all"
    mapfile -t wanted < <(comm -13 "$work/minimal" "$work/all")
    [ ${#wanted[@]} -gt 0 ] || fail "apt finds nothing to fetch: look at its sources"

    echo "fetching ${#wanted[@]} packages"
    mkdir "$folder/packages"
    cd "$folder/packages"
    apt apt-get download "${wanted[@]}" >"$work/log" 2>&1 ||
        fail "apt-get download failed: check the network ($(tail -n 1 "$work/log"))"
    for file in *.deb; do mv "$file" "${file%%_*}.deb"; done   # versions may hold what no URL takes
    index_of_packages >Packages
    comm -13 "$work/with_toolchain" "$work/with_libraries" >libraries.txt
    cd "$here"
}

fetch_wheels() {
    echo "fetching Python packages"
    "$python" -m venv "$work/venv"
    "$work/venv/bin/python" -m pip download --quiet --disable-pip-version-check --only-binary :all: \
        --dest "$folder/wheels" pip -r requirements.txt || fail "pip download failed: check the network"
    "$python" scripts/fetch_cuda_headers.py "$folder/cuda" || exit 2
}

write_readme() {
    release >"$folder/release"
    cat >"$folder/README" <<END
What diloco.c needs to be built and tested on $(cat "$folder/release") without a network.
Copy this whole folder, here DIR: the set-up checks that it is complete.
As root:          bash scripts/setup.sh --offline DIR
                  make
Without root:     bash scripts/setup.sh --offline DIR --prefix \$HOME/diloco-deps
                  make DEPS_HOME=\$HOME/diloco-deps
make train_gpt also needs CUDA's toolkit and NCCL, which are not in here.
END
    (cd "$folder" && find . -type f ! -name SHA256SUMS -print0 | sort -z | xargs -0 sha256sum >"$work/sums" &&
        mv "$work/sums" SHA256SUMS)
}

cd "$here"
fetch_packages
fetch_wheels
write_readme
mv "$folder" "$target"
echo "$target: $(du -sh "$target" | cut -f1), see README there"
