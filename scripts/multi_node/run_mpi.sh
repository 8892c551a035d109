#!/usr/bin/env bash
# Training started by mpirun: WORKERS workers of RANKS GPUs each, here two nodes of eight.
#     HOSTFILE=hosts scripts/multi_node/run_mpi.sh                 hosts: a line "NAME slots=8" for each node
#     RUN=gpt2_350M HOSTFILE=hosts scripts/multi_node/run_mpi.sh   another model; training.sh lists them
# mpirun only starts the processes (over ssh) and numbers them; nothing is sent over MPI. Run this script from
# the folder of the program, which must have the same path on all nodes. The store is a folder that all nodes
# see, or a Redis server (DILOCO_STORE=redis://:PASSWORD@HOST:6379). The options used here are Open MPI's;
# MPICH's mpirun passes the environment on by itself and takes `mpirun -n N -f HOSTFILE ./train_gpt ...`.
# Started again with the same OUT, a run resumes from its newest checkpoint. SIGTERM, SIGHUP or SIGUSR1 to this
# script stops the run with a checkpoint. Options after the script's name win over those of the .toml.
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

# The part of the environment that other nodes get, too.
passed_on=(-x DILOCO_STORE)
for name in DILOCO_CA LD_LIBRARY_PATH "${!AWS_@}" "${!OMP_@}" "${!NCCL_@}" "${!CUDA_@}"; do
    # On each node SLURM sets the GPUs of this job.
    if [ "$name" = CUDA_VISIBLE_DEVICES ] && [ -n "${SLURM_JOB_ID:-}" ]; then continue; fi
    [ -z "${!name:-}" ] || passed_on+=(-x "$name")
done

# By slot: a node is filled before the next, so that the ranks of a worker sit together. Bound to a core,
# which is mpirun's default, the threads of a process would compete for it.
# A SIGTERM that reaches mpirun ends the processes within two seconds; a SIGUSR1 it passes on, and they stop
# with a checkpoint. So this script sends it SIGUSR1, and runs it in a session of its own, where a signal to
# this script's whole group (Ctrl-C, timeout) does not reach it.
warn_of mpirun "$@"
is_interrupted=1 status=1
# Without $! it is not started yet.
trap 'is_interrupted=1; [ -n "${!:-}" ] || exit 143; kill -USR1 $! || true' TERM USR1 HUP
trap 'is_interrupted=1; [ -n "${!:-}" ] || exit 143; kill -INT $! || true' INT QUIT # at once
setsid mpirun -np $((WORKERS * RANKS)) ${HOSTFILE:+--hostfile "$HOSTFILE"} --map-by slot --bind-to none \
    "${passed_on[@]}" "$PROGRAM" "${training[@]}" "$@" &
mpirun=$!
while ((is_interrupted)); do
    is_interrupted=0 result=0
    wait $mpirun || result=$?
    ((result == 127)) || status=$result # 127: the signal came after mpirun's end
done
exit "$status"
