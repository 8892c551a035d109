#!/usr/bin/env bash
# GPT-2 1558M on 33.6B tokens of FineWeb-Edu, 32,000 steps of 1,048,576, with the hyperparameters of
# llm.c's scripts/run_gpt2_1558M.sh (gpt2_1558M.toml), on one machine.
# The data: data/fineweb.py --type edu --version 100B, and data/hellaswag.py.
# run.sh explains how to start this script, and what the numbers mean. To expect:
#
#     validation loss   none published, as far as we know. OpenAI's model has 2.8313 on FineWeb (llm.c's
#                       dev/vislog.ipynb), which is not this text
#     HellaSwag         OpenAI's model's, 48.9%, after about 25,000 steps (reports of llm.c's discussion 677)
#     time              8 H100: 2.75 s a step, 24 hours (discussion 677)
#     traffic           M   a step    at most    whole run   data parallel: a step, whole run
#                       2   8.03 MB   47.6 MB    257 GB      3.12 GB, 99.7 TB
#                       4   12 MB     71.3 MB    386 GB      4.67 GB, 150 TB
#                       8   14.1 MB   83.2 MB    450 GB      5.45 GB, 174 TB
#     memory            -b 16 61 GB (the .toml's), -b 8 40 GB, -b 8 -r 2 33 GB, -b 4 -r 2 26 GB
#     host memory       49.8 GB while eight processes start; then, for checkpoints, 34.3 GB a worker, and
#                       6.2 GB where the model is written
[ -f scripts/run.sh ] || { echo "error: no scripts/run.sh: start this from the folder of the program" >&2; exit 2; }
RUN=gpt2_1558M exec scripts/run.sh "$@"
