#!/usr/bin/env bash
# Trains on the GPUs of one machine, as WORKERS workers of RANKS GPUs each. RUN says what is trained;
# run_gpt2_124M.sh and the others set RUN and call this script. Run it from the folder of the program:
#     scripts/run_gpt2_124M.sh                          two workers of four GPUs: Streaming DiLoCo, tried out
#     OUT=log/plain WORKERS=1 RANKS=8 scripts/run_gpt2_124M.sh   one worker of eight: plain data parallel (with the
#                                                       same OUT it would resume the run above in that shape)
#     scripts/run_gpt2_124M.sh -x 1000 --overlap 5      options after the name win over those of the .toml
#     RUN=gpt2_350M scripts/run.sh                      the same as scripts/run_gpt2_350M.sh
# training.sh lists the other variables. On several machines: multi_node/README.md.
#
# The scripts' heads say what to expect. None of it has been measured with this program, which has not trained
# these models yet; dev/results/h200.md has its speed on one H200.
#     validation loss,  as published for llm.c, which trains the same model on the same data in data parallel.
#     HellaSwag, time   "Its head" is the head of llm.c's script
#     traffic           computed: what a worker with all its ranks sends in a step on average, at most in a
#                       step, and in the whole run, among M workers with E2M1 and H = 100. Data parallel would
#                       send 2 (M - 1) / M of the gradients, around a ring, in bf16
#     memory            computed, for each GPU in two workers of four: bf16 parameters, fp32 gradients, a
#                       rank's share of optimizer and outer state, and activations. CUDA, cuBLASLt and NCCL
#                       take one or two GB more
#     host memory       computed: 4 bytes a value in each process while it starts; for checkpoints 22 bytes a
#                       value, pinned, spread over a worker's ranks; 4 bytes a value where the model is
#                       written. CUDA and NCCL take more
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
