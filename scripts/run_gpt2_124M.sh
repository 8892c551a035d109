#!/usr/bin/env bash
# GPT-2 124M on 10B tokens of FineWeb, 18,865 steps of 524,288 tokens: llm.c's scripts/run_gpt2_124M.sh,
# with its hyperparameters (gpt2_124M.toml), on one machine:
#     scripts/run_gpt2_124M.sh                       two workers of four GPUs: Streaming DiLoCo, tried out
#     WORKERS=1 RANKS=8 scripts/run_gpt2_124M.sh     one worker of eight: plain data parallel
# On several: multi_node/README.md, with RUN=gpt2_124M. The data: data/fineweb.py
# and data/hellaswag.py. training.sh says what else can be set. Options given to this script win over the
# .toml's: `scripts/run_gpt2_124M.sh -x 1000 --overlap 5`.
#
# What to expect. None of it has been measured with this program: it has not trained this on GPUs yet. Loss,
# HellaSwag and time are what is published for llm.c, which is the same model and data in data parallel.
#     validation loss   3.29 (llm.c's discussion 481); 3.2722 with llm.c of October 2024 (modded-nanogpt,
#                       records/101324_llmc); OpenAI's model on these tokens: 3.4250 (llm.c's
#                       dev/vislog.ipynb)
#     HellaSwag         29.9% (reports of discussion 481); OpenAI's model: 29.4%
#     time              8 A100: 300 ms a step, 94 minutes (the script's head); 8 H100: 139 ms a step
#                       (records/101324_llmc), which makes 44 minutes
#     bytes             what a worker sends, all its ranks together, as the program plans it (computed)
#                       M   a step    at most    whole run   data parallel: a step, whole run
#                       2   0.642 MB  11 MB      12.1 GB     249 MB, 4.7 TB
#                       4   0.963 MB  16.4 MB    18.2 GB     373 MB, 7.04 TB
#                       8   1.12 MB   19.2 MB    21.2 GB     436 MB, 8.22 TB
#                       with E2M1 and H = 100; data parallel: a ring's 2 (M - 1) / M gradients, in bf16
#     memory            of a GPU in two workers of four: -b 64 29 GB, -b 32 15 GB (the .toml's), -b 8 5 GB:
#                       bf16 parameters, fp32 gradients, a rank's share of optimizer and outer state, and
#                       activations, added up; CUDA, cuBLASLt and NCCL take one or two more
#     host memory       4 GB while eight processes start (4 bytes a value in each); then, for checkpoints,
#                       2.7 GB a worker (22 bytes a value, pinned, spread over its ranks) and 0.5 GB where
#                       the model is written; added up, without what CUDA and NCCL take
RUN=gpt2_124M exec scripts/run.sh "$@"
