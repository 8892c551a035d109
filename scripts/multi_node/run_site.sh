#!/usr/bin/env bash
# Training across sites that share nothing but a Redis server or a bucket (s3.md): one worker, on RANKS GPUs of
# this machine.
#     WORKER=0 REDIS=10.7.0.1:6379 scripts/multi_node/run_site.sh     at one site
#     WORKER=1 REDIS=10.7.0.1:6379 scripts/multi_node/run_site.sh     at the other
# They may be started in any order, within TIMEOUT. All sites need the same RUN (training.sh lists them),
# WORKERS, RANKS and options; a difference is named and ends the run. Each may have its own data or the same:
# in an epoch a site trains on one of WORKERS parts of its own. Where they differ in tokens, give -x if the
# .toml has max-steps = -1.
# Started again at all sites with the same OUT, a run resumes from its newest checkpoint. README.md beside
# this script goes through it step by step: WireGuard, redis_server.sh, firewalls. A site that is a SLURM
# cluster uses run_slurm_site.sbatch. Options after the script's name win over those of the .toml.
set -euo pipefail

WORKERS=${WORKERS:-2}
WORKER=${WORKER:-} # this site, from 0
RANKS=${RANKS:-8}
out_suffix=-worker$WORKER
INTERFACE=${INTERFACE:-wg0} # WireGuard's: what the workers exchange is not encrypted by itself
TIMEOUT=${TIMEOUT:-600} # seconds to wait for the other sites to be started, or to answer
[ -f scripts/training.sh ] ||
    { echo "error: no scripts/training.sh: start this from the folder of the program" >&2 && exit 2; }
# shellcheck source=scripts/training.sh
source scripts/training.sh
RUN_NAME=${RUN_NAME:-$RUN} # runs that share a server need different ones
numbers WORKERS RANKS
if ! [[ $WORKER =~ ^(0|[1-9][0-9]*)$ && $WORKER -lt $WORKERS ]]; then
    fail "this site is worker '$WORKER' of $WORKERS: set WORKER to 0 ... $((WORKERS - 1))"
fi
[ ! -d /sys/class/net ] || [ -e "/sys/class/net/$INTERFACE" ] || \
    fail "no network interface $INTERFACE: bring it up, or set INTERFACE"
meet_at_redis
train_by "$WORKERS" "$RANKS"

# TCP: between sites NCCL would hold a part of the GPU while it waits for the network.
transport=tcp
! is_elastic || transport=store # CONFIG says so
exec "$PROGRAM" "${training[@]}" --worker "$WORKER" --interface "$INTERFACE" --outer-transport "$transport" \
    --run-name "$RUN_NAME" --timeout "$TIMEOUT" "$@"
