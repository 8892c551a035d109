#!/usr/bin/env bash
# Trains on the GPUs of one machine, as WORKERS workers of RANKS GPUs each; run_gpt2_124M.sh and the others
# are this with RUN set. The program starts all processes by itself. Run it from the folder of the program;
# training.sh says what else the environment sets. Options after the script's name win over the .toml's:
#     RUN=gpt2_350M scripts/run.sh -x 1000 --overlap 5
set -euo pipefail

WORKERS=${WORKERS:-2}
RANKS=${RANKS:-4}
[ -f scripts/training.sh ] ||
    { echo "error: no scripts/training.sh: start this from the folder of the program" >&2 && exit 2; }
# shellcheck source=scripts/training.sh
source scripts/training.sh
numbers WORKERS RANKS
train_by "$WORKERS" "$RANKS"
exec "$PROGRAM" "${training[@]}" "$@"
