#!/usr/bin/env bash
# Writes the keys that the AWS command line has now to FILE, and again every SECONDS (600; 0: once). Keys of
# single sign-on, of a role and of an instance are valid for hours, and a run takes weeks: workers read FILE
# again when the bucket refuses their keys.
#     scripts/multi_node/s3_keys.sh FILE [SECONDS] &
#     export AWS_SHARED_CREDENTIALS_FILE=FILE     for the workers, not for this script
# AWS_PROFILE chooses the keys, and is the name of their profile in FILE.
set -euo pipefail

file=${1:?"usage: s3_keys.sh FILE [SECONDS]"}
seconds=${2:-600}
umask 077
while true; do
    if keys=$(aws configure export-credentials --format env-no-export | sed 's/^[A-Z_]*=/\L&/'); then
        printf '[%s]\n%s\n' "${AWS_PROFILE:-default}" "$keys" > "$file.new"
        mv "$file.new" "$file" # at once, so that no worker reads half of it
    elif [ "$seconds" = 0 ]; then
        exit 1
    else
        echo "warning: no keys from aws: log in again, e.g. with 'aws sso login'" >&2
    fi
    [ "$seconds" != 0 ] || exit 0
    sleep "$seconds"
done
