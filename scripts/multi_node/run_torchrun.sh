#!/usr/bin/env bash
# Training started by torchrun, for clusters and clouds whose tools start that. Run it once on each node:
#     NODES=2 NODE=0 MASTER=node0:29500 scripts/multi_node/run_torchrun.sh     on node0
#     NODES=2 NODE=1 MASTER=node0:29500 scripts/multi_node/run_torchrun.sh     on the other
# torchrun only starts the processes and numbers them (RANK, LOCAL_RANK, WORLD_SIZE); MASTER is where its
# agents meet. The program itself needs no PyTorch, and meets in DILOCO_STORE: a folder that all nodes see, or
# a Redis server (redis://:PASSWORD@HOST:6379). A worker is a node, unless WORKERS divides the processes
# otherwise. RUN says what is trained (training.sh lists the runs). Started again with the same OUT, a run
# resumes from its newest checkpoint. SIGTERM to torchrun stops a run with a checkpoint if half a minute is
# enough; then torchrun kills the rest. torchrun itself ends with 1 whatever the program's status was, so do not
# start it again in a loop: a worker that another process has replaced would take its place back. For one worker
# of several sites use run_site.sh. Options after the script's name win over those of the .toml.
set -euo pipefail

# OMP_NUM_THREADS is 1 if it is not set: with PROGRAM=./train_gpt_cpu, set it
NODES=${NODES:-2}
NODE=${NODE:-} # this one, from 0
GPUS=${GPUS:-8} # processes on a node
WORKERS=${WORKERS:-$NODES}
MASTER=${MASTER:-}
[ -f scripts/training.sh ] ||
    { echo "error: no scripts/training.sh: start this from the folder of the program" >&2 && exit 2; }
# shellcheck source=scripts/training.sh
source scripts/training.sh
numbers NODES GPUS WORKERS
command -v torchrun >/dev/null || fail "there is no torchrun: install PyTorch, or see run_mpi.sh"
if ! [[ $NODE =~ ^(0|[1-9][0-9]*)$ && $NODE -lt $NODES ]]; then
    fail "this is node '$NODE' of $NODES: set NODE to 0 ... $((NODES - 1))"
fi
((NODES > 1)) || MASTER=${MASTER:-localhost:29500}
[[ $MASTER =~ .:[0-9]+$ ]] || fail "MASTER is '$MASTER': set it to HOST:PORT of node 0, the same on all nodes"
if ((NODES * GPUS % WORKERS != 0)); then
    fail "$NODES x $GPUS processes do not divide into $WORKERS workers: set WORKERS"
fi
train_by "$WORKERS" $((NODES * GPUS / WORKERS))
export DILOCO_STORE=${DILOCO_STORE:-file:$OUT/store}

warn_of torchrun "$@"
# No restarts, torchrun's default: a process that dies ends the run, which is started again as a whole.
# Underscores: torchrun takes dashes only since PyTorch 2.0.
exec torchrun --nnodes "$NODES" --node_rank "$NODE" --nproc_per_node "$GPUS" --max_restarts 0 \
    --master_addr "${MASTER%:*}" --master_port "${MASTER##*:}" --no_python \
    "$PROGRAM" "${training[@]}" "$@"
