#!/usr/bin/env bash
# GPT-3 125M on 300B tokens of FineWeb, 572,204 steps of 524,288 tokens, with the hyperparameters of
# llm.c's scripts/run_gpt3_125M.sh (gpt3_125M.toml), on one machine.
# The data: data/fineweb.py --version 100B, and data/hellaswag.py.
# run.sh explains how to start this script, and what the numbers mean. To expect:
#
#     validation loss   none published, as far as we know
#     HellaSwag         none published for this run; OpenAI's GPT-3 Small: 33.7% (arXiv 2005.14165, table H.1)
#     time              8 A100: ~150 ms a step, 24 hours (its head; the head of llm.c's
#                       run_gpt2_124M.sh has 300 ms for a step of as many tokens on the same machine)
#     traffic           M   a step    at most    whole run   data parallel: a step, whole run
#                       2   0.646 MB  11 MB      370 GB      251 MB, 143 TB
#                       4   0.969 MB  16.4 MB    554 GB      376 MB, 215 TB
#                       8   1.13 MB   19.2 MB    647 GB      438 MB, 251 TB
#     memory            -b 32 28 GB, -b 16 15 GB (the .toml's), -b 8 8 GB
#     host memory       4 GB while eight processes start; then, for checkpoints, 2.8 GB a worker, and
#                       0.5 GB where the model is written
[ -f scripts/run.sh ] || { echo "error: no scripts/run.sh: start this from the folder of the program" >&2; exit 2; }
RUN=gpt3_125M exec scripts/run.sh "$@"
