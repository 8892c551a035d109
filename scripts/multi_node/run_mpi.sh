#!/usr/bin/env bash
# Training started by mpirun: WORKERS workers of RANKS GPUs each, here two nodes of eight.
#     HOSTFILE=hosts scripts/multi_node/run_mpi.sh                 hosts: a line "NAME slots=8" for each node
#     RUN=gpt2_350M HOSTFILE=hosts scripts/multi_node/run_mpi.sh   another model; training.sh has the list
# mpirun only starts the processes (over ssh) and numbers them; nothing is sent over MPI. Run it from the
# folder of the program, which must lie at the same place on all nodes; the store is a folder that all see, or
# a Redis server (DILOCO_STORE=redis://:PASSWORD@HOST:6379). These are Open MPI's options; MPICH's passes
# the environment on by itself, and takes `mpirun -n N -f HOSTFILE ./train_gpt ...`.
# Started again with the same OUT, a run goes on from its newest checkpoint.
# Options after the script's name win over those of the .toml.
set -euo pipefail

WORKERS=${WORKERS:-2}
RANKS=${RANKS:-8}
HOSTFILE=${HOSTFILE:-} # empty: this machine, or the nodes of the SLURM job that this runs in
[ -f scripts/training.sh ] ||
    { echo "error: no scripts/training.sh: start this from the folder of the program" >&2 && exit 2; }
# shellcheck source=scripts/training.sh
source scripts/training.sh
numbers WORKERS RANKS
command -v mpirun >/dev/null || fail "there is no mpirun: install Open MPI (Debian: openmpi-bin)"
train_by "$WORKERS" "$RANKS"
export DILOCO_STORE=${DILOCO_STORE:-file:$OUT/store}

# What of the environment other nodes get, too.
passed_on=(-x DILOCO_STORE)
for name in LD_LIBRARY_PATH "${!OMP_@}" "${!NCCL_@}"; do
    [ -z "${!name:-}" ] || passed_on+=(-x "$name")
done

# By slot: a node is filled before the next, so that the ranks of a worker sit together. Bound to a core, as
# mpirun would have it, the threads of a process would stand in each other's way.
exec mpirun -np $((WORKERS * RANKS)) ${HOSTFILE:+--hostfile "$HOSTFILE"} --map-by slot --bind-to none \
    "${passed_on[@]}" "$PROGRAM" "${training[@]}" "$@"
