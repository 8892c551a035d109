#!/usr/bin/env bash
# GPT-2 124M across sites that share nothing but a Redis server: one worker, RANKS GPUs of this machine.
#     WORKER=0 REDIS=10.7.0.1:6379 scripts/multi_node/run_site.sh     at one site
#     WORKER=1 REDIS=10.7.0.1:6379 scripts/multi_node/run_site.sh     at the other
# They may be started in any order, within TIMEOUT. All sites need the same WORKERS, RANKS and options (a
# difference is named and ends the run), and data of their own or the same. README.md beside this script goes
# through it step by step: WireGuard, redis_server.sh, firewalls. A site that is a SLURM cluster:
# run_slurm_site.sbatch. Options after the script's name win over gpt2_124M.toml.
set -euo pipefail

PROGRAM=${PROGRAM:-./train_gpt} # ./train_gpt_cpu where there is no GPU
CONFIG=${CONFIG:-scripts/gpt2_124M.toml}
TRAIN_DATA=${TRAIN_DATA:-data/fineweb10B/fineweb_train_*.bin}
VAL_DATA=${VAL_DATA:-data/fineweb10B/fineweb_val_*.bin}
WORKERS=${WORKERS:-2}
WORKER=${WORKER:-} # this site, from 0
RANKS=${RANKS:-8}
OUT=${OUT:-log/gpt2_124M-worker$WORKER}
BATCH=${BATCH:-32} # sequences a GPU takes at once
TOKENS=${TOKENS:-524288} # in a step of all workers; a multiple of WORKERS x RANKS x BATCH x 1024
REDIS=${REDIS:-10.7.0.1:6379}
PASSWORD_FILE=${PASSWORD_FILE:-$HOME/.diloco-password} # of that server
INTERFACE=${INTERFACE:-wg0} # WireGuard's: what the workers exchange is not encrypted by itself
RUN_NAME=${RUN_NAME:-gpt2_124M} # runs that share a server need different ones
TIMEOUT=${TIMEOUT:-600} # seconds to wait for the other sites to be started, or to answer

fail() {
    echo "error: $1" >&2
    exit 2
}
command -v "$PROGRAM" >/dev/null || fail "there is no $PROGRAM: run make train_gpt, or set PROGRAM"
for name in WORKERS RANKS BATCH TOKENS; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || fail "$name is '${!name}': set it to a whole number"
done
if ! [[ $WORKER =~ ^[0-9]+$ && $WORKER -lt $WORKERS ]]; then
    fail "this site is worker '$WORKER' of $WORKERS: set WORKER to 0 ... $((WORKERS - 1))"
fi
[ ! -d /sys/class/net ] || [ -e "/sys/class/net/$INTERFACE" ] || \
    fail "no network interface $INTERFACE: bring it up, or set INTERFACE"
if [ -z "${DILOCO_STORE:-}" ]; then
    [ -s "$PASSWORD_FILE" ] || fail "no password in $PASSWORD_FILE: copy the Redis server's there"
    DILOCO_STORE=redis://:$(cat "$PASSWORD_FILE")@$REDIS
fi
export DILOCO_STORE # as an option of the program, other users of this machine could read it

# Gloo: between sites NCCL would hold a part of the GPU while it waits for the network.
exec "$PROGRAM" --config "$CONFIG" -i "$TRAIN_DATA" -j "$VAL_DATA" -o "$OUT" \
    --workers "$WORKERS" --ranks "$RANKS" --worker "$WORKER" -b "$BATCH" -d $((TOKENS / WORKERS)) \
    --interface "$INTERFACE" --outer-transport gloo --run-name "$RUN_NAME" --timeout "$TIMEOUT" "$@"
