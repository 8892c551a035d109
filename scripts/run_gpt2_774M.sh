#!/usr/bin/env bash
# GPT-2 774M on 150B tokens of FineWeb, 286,102 steps of 524,288 tokens, with the hyperparameters of
# llm.c's scripts/run_gpt2_774M.sh (gpt2_774M.toml), on one machine.
# The data: data/fineweb.py --version 100B, and data/hellaswag.py.
# run.sh explains how to start this script, and what the numbers mean. To expect:
#
#     validation loss   none published, as far as we know; OpenAI's model on these tokens: 3.0006 (llm.c's
#                       dev/vislog.ipynb)
#     HellaSwag         none published, as far as we know; OpenAI's model: 43.2% (the same)
#     time              8 A100: 1.7 s a step, 135 hours (its head); about 6 days (discussion 580)
#     traffic           M   a step    at most    whole run   data parallel: a step, whole run
#                       2   3.99 MB   30.4 MB    1.14 TB     1.55 GB, 443 TB
#                       4   5.99 MB   45.7 MB    1.71 TB     2.32 GB, 664 TB
#                       8   6.99 MB   53.3 MB    2 TB        2.71 GB, 775 TB
#     memory            -b 32 62 GB (the .toml's), -b 16 36 GB,
#                       -b 16 -r 2 27 GB, -b 4 -r 2 14 GB
#     host memory       24.8 GB while eight processes start; then, for checkpoints, 17 GB a worker, and
#                       3.1 GB where the model is written
[ -f scripts/run.sh ] || { echo "error: no scripts/run.sh: start this from the folder of the program" >&2; exit 2; }
RUN=gpt2_774M exec scripts/run.sh "$@"
