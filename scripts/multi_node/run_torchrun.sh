#!/usr/bin/env bash
# GPT-2 124M started by torchrun, for clusters and clouds whose tools know how to start that. Once on each
# node:
#     NODES=2 NODE=0 MASTER=node0:29500 scripts/multi_node/run_torchrun.sh     on node0
#     NODES=2 NODE=1 MASTER=node0:29500 scripts/multi_node/run_torchrun.sh     on the other
# torchrun only starts the processes and numbers them (RANK, LOCAL_RANK, WORLD_SIZE); MASTER is where its
# agents meet. The program itself needs no PyTorch, and meets in DILOCO_STORE: a folder that all nodes see, or
# a Redis server (redis://:PASSWORD@HOST:6379). A worker is a node, or what WORKERS makes of all processes.
# Options after the script's name win over gpt2_124M.toml.
set -euo pipefail

PROGRAM=${PROGRAM:-./train_gpt} # ./train_gpt_cpu where there is no GPU; OMP_NUM_THREADS is 1 then if not set
CONFIG=${CONFIG:-scripts/gpt2_124M.toml}
TRAIN_DATA=${TRAIN_DATA:-data/fineweb10B/fineweb_train_*.bin}
VAL_DATA=${VAL_DATA:-data/fineweb10B/fineweb_val_*.bin}
OUT=${OUT:-log/gpt2_124M}
NODES=${NODES:-2}
NODE=${NODE:-} # this one, from 0
GPUS=${GPUS:-8} # processes on a node
WORKERS=${WORKERS:-$NODES}
BATCH=${BATCH:-32} # sequences a GPU takes at once
TOKENS=${TOKENS:-524288} # in a step of all workers; a multiple of NODES x GPUS x BATCH x 1024
MASTER=${MASTER:-localhost:29500}
export DILOCO_STORE=${DILOCO_STORE:-file:$OUT/store}

fail() {
    echo "error: $1" >&2
    exit 2
}
command -v torchrun >/dev/null || fail "there is no torchrun: install PyTorch, or see run_mpi.sh"
command -v "$PROGRAM" >/dev/null || fail "there is no $PROGRAM: run make train_gpt, or set PROGRAM"
for name in NODES GPUS WORKERS BATCH TOKENS; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || fail "$name is '${!name}': set it to a whole number"
done
compgen -G "$TRAIN_DATA" >/dev/null || fail "no file matches $TRAIN_DATA: set TRAIN_DATA to your token shards"
if ! [[ $NODE =~ ^[0-9]+$ && $NODE -lt $NODES ]]; then
    fail "this is node '$NODE' of $NODES: set NODE to 0 ... $((NODES - 1))"
fi
if ((NODES * GPUS % WORKERS != 0)); then
    fail "$NODES x $GPUS processes do not divide into $WORKERS workers: set WORKERS"
fi

# No restarts, torchrun's default: a run that is started again begins at step 1.
exec torchrun --nnodes "$NODES" --node-rank "$NODE" --nproc-per-node "$GPUS" --max-restarts 0 \
    --master-addr "${MASTER%:*}" --master-port "${MASTER##*:}" --no-python \
    "$PROGRAM" --config "$CONFIG" -i "$TRAIN_DATA" -j "$VAL_DATA" -o "$OUT" \
    --workers "$WORKERS" --ranks $((NODES * GPUS / WORKERS)) -b "$BATCH" -d $((TOKENS / WORKERS)) "$@"
