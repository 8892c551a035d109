#!/usr/bin/env bash
# Writes the keys that the AWS command line has now to FILE, and again every SECONDS (120; 0: once). Keys of
# single sign-on, of a role and of an instance are valid for hours, and a run takes weeks: workers read FILE
# again when the bucket refuses their keys. s3.md shows how to use it.
#     scripts/multi_node/s3_keys.sh FILE [SECONDS]
# AWS_PROFILE chooses the keys, and is the name of their profile in FILE.
set -euo pipefail

fail() {
    echo "error: $1" >&2
    exit 2
}
file=${1:-}
seconds=${2:-120}
[ -n "$file" ] || fail "usage: s3_keys.sh FILE [SECONDS]"
version=$(aws --version 2>&1 || true)
[[ $version =~ ^aws-cli/([2-9]|[1-9][0-9]) ]] || fail "this needs version 2 of the AWS command line (aws)"
# Else the command line would only read what this script has written before.
if [ "${AWS_SHARED_CREDENTIALS_FILE:-}" = "$file" ]; then unset AWS_SHARED_CREDENTIALS_FILE; fi

write_keys() {
    local keys new
    keys=$(aws configure export-credentials --format env-no-export | sed 's/^[A-Z_]*=/\L&/') || return
    mkdir -p "$(dirname "$file")" && new=$(mktemp "$file.XXXXXX") || return # which others may not read
    printf '[%s]\n%s\n' "${AWS_PROFILE:-default}" "$keys" > "$new" && mv "$new" "$file"
}

while true; do
    if ! write_keys; then
        echo "warning: no new keys in $file: log in again (aws sso login), or see above what is wrong" >&2
        [ "$seconds" != 0 ] || exit 1
    fi
    [ "$seconds" != 0 ] || exit 0
    sleep "$seconds"
done
