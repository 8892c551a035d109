#!/usr/bin/env bash
# GPT-2 350M on 31.5B tokens of FineWeb, 60,000 steps of 524,288 tokens: llm.c's scripts/run_gpt2_350M.sh,
# with its hyperparameters (gpt2_350M.toml), on one machine:
#     scripts/run_gpt2_350M.sh                       two workers of four GPUs: Streaming DiLoCo, tried out
#     WORKERS=1 RANKS=8 scripts/run_gpt2_350M.sh     one worker of eight: plain data parallel
# On several: multi_node/README.md, with RUN=gpt2_350M. The data: data/fineweb.py --version 100B
# and data/hellaswag.py. training.sh says what else can be set. Options given to this script win over the
# .toml's: `scripts/run_gpt2_350M.sh -x 1000 --overlap 5`.
#
# What to expect. None of it has been measured with this program: it has not trained this on GPUs yet. Loss,
# HellaSwag and time are what is published for llm.c, which is the same model and data in data parallel.
#     validation loss   none published that we know of; OpenAI's model on these tokens: 3.0831 (llm.c's
#                       dev/vislog.ipynb)
#     HellaSwag         none published that we know of; OpenAI's model: 37.5% (the same)
#     time              8 A100: 820 ms a step, 13.7 hours (the script's head)
#     bytes             what a worker sends, all its ranks together, as the program plans it (computed)
#                       M   a step    at most    whole run   data parallel: a step, whole run
#                       2   1.83 MB   19.5 MB    110 GB      710 MB, 42.6 TB
#                       4   2.74 MB   29.2 MB    165 GB      1.06 GB, 63.9 TB
#                       8   3.2 MB    34.1 MB    192 GB      1.24 GB, 74.5 TB
#                       with E2M1 and H = 100; data parallel: a ring's 2 (M - 1) / M gradients, in bf16
#     memory            of a GPU in two workers of four: -b 64 64 GB, -b 32 34 GB (the .toml's), -b 16 19 GB,
#                       -b 16 -r 2 15 GB, -b 4 -r 2 7 GB:
#                       bf16 parameters, fp32 gradients, a rank's share of optimizer and outer state, and
#                       activations, added up; CUDA, cuBLASLt and NCCL take one or two more
#     host memory       11.4 GB while eight processes start (4 bytes a value in each); then, for checkpoints,
#                       7.8 GB a worker (22 bytes a value, pinned, spread over its ranks) and 1.4 GB where
#                       the model is written; added up, without what CUDA and NCCL take
RUN=gpt2_350M exec scripts/run.sh "$@"
