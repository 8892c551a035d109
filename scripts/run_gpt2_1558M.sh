#!/usr/bin/env bash
# GPT-2 1558M on 33.6B tokens of FineWeb-Edu, 32,000 steps of 1,048,576: llm.c's scripts/run_gpt2_1558M.sh,
# with its hyperparameters (gpt2_1558M.toml), on one machine:
#     scripts/run_gpt2_1558M.sh                       two workers of four GPUs: Streaming DiLoCo, tried out
#     WORKERS=1 RANKS=8 scripts/run_gpt2_1558M.sh     one worker of eight: plain data parallel
# On several: multi_node/README.md, with RUN=gpt2_1558M. The data: data/fineweb.py --type edu --version 100B
# and data/hellaswag.py. training.sh says what else can be set. Options given to this script win over the
# .toml's: `scripts/run_gpt2_1558M.sh -x 1000 --overlap 5`.
#
# What to expect. None of it has been measured with this program: it has not trained this on GPUs yet. Loss,
# HellaSwag and time are what is published for llm.c, which is the same model and data in data parallel.
#     validation loss   none published that we know of. OpenAI's model has 2.8313 on FineWeb (llm.c's
#                       dev/vislog.ipynb), which is not this text
#     HellaSwag         OpenAI's model's, 48.9%, after about 25,000 steps (reports of llm.c's discussion 677)
#     time              8 H100: 2.75 s a step, 24 hours (discussion 677)
#     bytes             what a worker sends, all its ranks together, as the program plans it (computed)
#                       M   a step    at most    whole run   data parallel: a step, whole run
#                       2   8.03 MB   47.6 MB    257 GB      3.12 GB, 99.7 TB
#                       4   12 MB     71.3 MB    386 GB      4.67 GB, 150 TB
#                       8   14.1 MB   83.2 MB    450 GB      5.45 GB, 174 TB
#                       with E2M1 and H = 100; data parallel: a ring's 2 (M - 1) / M gradients, in bf16
#     memory            of a GPU in two workers of four: -b 16 61 GB (the .toml's), -b 8 40 GB,
#                       -b 8 -r 2 33 GB, -b 4 -r 2 26 GB:
#                       bf16 parameters, fp32 gradients, a rank's share of optimizer and outer state, and
#                       activations, added up; CUDA, cuBLASLt and NCCL take one or two more
#     host memory       49.8 GB while eight processes start (4 bytes a value in each); then, for checkpoints,
#                       34.3 GB a worker (22 bytes a value, pinned, spread over its ranks) and 6.2 GB where
#                       the model is written; added up, without what CUDA and NCCL take
RUN=gpt2_1558M exec scripts/run.sh "$@"
