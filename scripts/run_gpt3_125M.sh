#!/usr/bin/env bash
# GPT-3 125M on 300B tokens of FineWeb, 572,204 steps of 524,288 tokens: llm.c's scripts/run_gpt3_125M.sh,
# with its hyperparameters (gpt3_125M.toml), on one machine:
#     scripts/run_gpt3_125M.sh                       two workers of four GPUs: Streaming DiLoCo, tried out
#     WORKERS=1 RANKS=8 scripts/run_gpt3_125M.sh     one worker of eight: plain data parallel
# On several: multi_node/README.md, with RUN=gpt3_125M. The data: data/fineweb.py --version 100B
# and data/hellaswag.py. training.sh says what else can be set. Options given to this script win over the
# .toml's: `scripts/run_gpt3_125M.sh -x 1000 --overlap 5`.
#
# What to expect. None of it has been measured with this program: it has not trained this on GPUs yet. Loss,
# HellaSwag and time are what is published for llm.c, which is the same model and data in data parallel.
#     validation loss   none published that we know of
#     HellaSwag         none published for this run; OpenAI's GPT-3 Small: 33.7% (arXiv 2005.14165, table H.1)
#     time              8 A100: ~150 ms a step, 24 hours (the script's head; 300 ms, for a step of as many
#                       tokens on the same machine, says that of run_gpt2_124M.sh)
#     bytes             what a worker sends, all its ranks together, as the program plans it (computed)
#                       M   a step    at most    whole run   data parallel: a step, whole run
#                       2   0.646 MB  11 MB      370 GB      251 MB, 143 TB
#                       4   0.969 MB  16.4 MB    554 GB      376 MB, 215 TB
#                       8   1.13 MB   19.2 MB    647 GB      438 MB, 251 TB
#                       with E2M1 and H = 100; data parallel: a ring's 2 (M - 1) / M gradients, in bf16
#     memory            of a GPU in two workers of four: -b 32 28 GB, -b 16 15 GB (the .toml's), -b 8 8 GB:
#                       bf16 parameters, fp32 gradients, a rank's share of optimizer and outer state, and
#                       activations, added up; CUDA, cuBLASLt and NCCL take one or two more
#     host memory       4 GB while eight processes start (4 bytes a value in each); then, for checkpoints,
#                       2.8 GB a worker (22 bytes a value, pinned, spread over its ranks) and 0.5 GB where
#                       the model is written; added up, without what CUDA and NCCL take
RUN=gpt3_125M exec scripts/run.sh "$@"
