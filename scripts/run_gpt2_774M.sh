#!/usr/bin/env bash
# GPT-2 774M on 150B tokens of FineWeb, 286,102 steps of 524,288 tokens: llm.c's scripts/run_gpt2_774M.sh,
# with its hyperparameters (gpt2_774M.toml), on one machine:
#     scripts/run_gpt2_774M.sh                       two workers of four GPUs: Streaming DiLoCo, tried out
#     WORKERS=1 RANKS=8 scripts/run_gpt2_774M.sh     one worker of eight: plain data parallel
# On several: multi_node/README.md, with RUN=gpt2_774M. The data: data/fineweb.py --version 100B
# and data/hellaswag.py. training.sh says what else can be set. Options given to this script win over the
# .toml's: `scripts/run_gpt2_774M.sh -x 1000 --overlap 5`.
#
# What to expect. None of it has been measured with this program: it has not trained this on GPUs yet. Loss,
# HellaSwag and time are what is published for llm.c, which is the same model and data in data parallel.
#     validation loss   none published that we know of; OpenAI's model on these tokens: 3.0006 (llm.c's
#                       dev/vislog.ipynb)
#     HellaSwag         none published that we know of; OpenAI's model: 43.2% (the same)
#     time              8 A100: 1.7 s a step, 135 hours (the script's head); about 6 days (discussion 580)
#     bytes             what a worker sends, all its ranks together, as the program plans it (computed)
#                       M   a step    at most    whole run   data parallel: a step, whole run
#                       2   3.99 MB   30.4 MB    1.14 TB     1.55 GB, 443 TB
#                       4   5.99 MB   45.7 MB    1.71 TB     2.32 GB, 664 TB
#                       8   6.99 MB   53.3 MB    2 TB        2.71 GB, 775 TB
#                       with E2M1 and H = 100; data parallel: a ring's 2 (M - 1) / M gradients, in bf16
#     memory            of a GPU in two workers of four: -b 32 62 GB (the .toml's), -b 16 36 GB,
#                       -b 16 -r 2 27 GB, -b 4 -r 2 14 GB:
#                       bf16 parameters, fp32 gradients, a rank's share of optimizer and outer state, and
#                       activations, added up; CUDA, cuBLASLt and NCCL take one or two more
#     host memory       24.8 GB while eight processes start (4 bytes a value in each); then, for checkpoints,
#                       17 GB a worker (22 bytes a value, pinned, spread over its ranks) and 3.1 GB where
#                       the model is written; added up, without what CUDA and NCCL take
RUN=gpt2_774M exec scripts/run.sh "$@"
