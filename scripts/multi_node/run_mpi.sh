#!/usr/bin/env bash
# GPT-2 124M started by mpirun: WORKERS workers of RANKS GPUs each, here two nodes of eight.
#     HOSTFILE=hosts scripts/multi_node/run_mpi.sh     hosts: a line "NAME slots=8" for each node
# mpirun only starts the processes (over ssh) and numbers them; nothing is sent over MPI. Run it from the
# folder of the program, which must lie at the same place on all nodes; the store is a folder that all see, or
# a Redis server (DILOCO_STORE=redis://:PASSWORD@HOST:6379). These are Open MPI's options; MPICH's passes
# the environment on by itself, and takes `mpirun -n N -f HOSTFILE ./train_gpt ...`.
# Options after the script's name win over gpt2_124M.toml.
set -euo pipefail

PROGRAM=${PROGRAM:-./train_gpt} # ./train_gpt_cpu where there is no GPU; set OMP_NUM_THREADS then
CONFIG=${CONFIG:-scripts/gpt2_124M.toml}
TRAIN_DATA=${TRAIN_DATA:-data/fineweb10B/fineweb_train_*.bin}
VAL_DATA=${VAL_DATA:-data/fineweb10B/fineweb_val_*.bin}
OUT=${OUT:-log/gpt2_124M}
WORKERS=${WORKERS:-2}
RANKS=${RANKS:-8}
BATCH=${BATCH:-32} # sequences a GPU takes at once
TOKENS=${TOKENS:-524288} # in a step of all workers; a multiple of WORKERS x RANKS x BATCH x 1024
HOSTFILE=${HOSTFILE:-} # empty: this machine, or the nodes of the SLURM job that this runs in
export DILOCO_STORE=${DILOCO_STORE:-file:$OUT/store}

fail() {
    echo "error: $1" >&2
    exit 2
}
command -v mpirun >/dev/null || fail "there is no mpirun: install Open MPI (Debian: openmpi-bin)"
command -v "$PROGRAM" >/dev/null || fail "there is no $PROGRAM: run make train_gpt, or set PROGRAM"
for name in WORKERS RANKS BATCH TOKENS; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || fail "$name is '${!name}': set it to a whole number"
done
compgen -G "$TRAIN_DATA" >/dev/null || fail "no file matches $TRAIN_DATA: set TRAIN_DATA to your token shards"

# What of the environment other nodes get, too.
passed_on=(-x DILOCO_STORE)
for name in LD_LIBRARY_PATH "${!OMP_@}" "${!NCCL_@}"; do
    [ -z "${!name:-}" ] || passed_on+=(-x "$name")
done

# By slot: a node is filled before the next, so that the ranks of a worker sit together. Bound to a core, as
# mpirun would have it, the threads of a process would stand in each other's way.
exec mpirun -np $((WORKERS * RANKS)) ${HOSTFILE:+--hostfile "$HOSTFILE"} --map-by slot --bind-to none \
    "${passed_on[@]}" \
    "$PROGRAM" --config "$CONFIG" -i "$TRAIN_DATA" -j "$VAL_DATA" -o "$OUT" \
    --workers "$WORKERS" --ranks "$RANKS" -b "$BATCH" -d $((TOKENS / WORKERS)) "$@"
