#!/usr/bin/env bash
# GPT-2 350M on 31.5B tokens of FineWeb, 60,000 steps of 524,288 tokens, with the hyperparameters of
# llm.c's scripts/run_gpt2_350M.sh (gpt2_350M.toml), on one machine.
# The data: data/fineweb.py --version 100B, and data/hellaswag.py.
# run.sh explains how to start this script, and what the numbers mean. To expect:
#
#     validation loss   none published, as far as we know; OpenAI's model on these tokens: 3.0831 (llm.c's
#                       dev/vislog.ipynb)
#     HellaSwag         none published, as far as we know; OpenAI's model: 37.5% (the same)
#     time              8 A100: 820 ms a step, 13.7 hours (its head)
#     traffic           M   a step    at most    whole run   data parallel: a step, whole run
#                       2   1.83 MB   19.5 MB    110 GB      710 MB, 42.6 TB
#                       4   2.74 MB   29.2 MB    165 GB      1.06 GB, 63.9 TB
#                       8   3.2 MB    34.1 MB    192 GB      1.24 GB, 74.5 TB
#     memory            -b 64 64 GB, -b 32 34 GB (the .toml's), -b 16 19 GB,
#                       -b 16 -r 2 15 GB, -b 4 -r 2 7 GB
#     host memory       11.4 GB while eight processes start; then, for checkpoints, 7.8 GB a worker, and
#                       1.4 GB where the model is written
[ -f scripts/run.sh ] || { echo "error: no scripts/run.sh: start this from the folder of the program" >&2; exit 2; }
RUN=gpt2_350M exec scripts/run.sh "$@"
