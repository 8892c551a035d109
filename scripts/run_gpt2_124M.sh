#!/usr/bin/env bash
# GPT-2 124M on 10B tokens of FineWeb, 18,865 steps of 524,288 tokens, with the hyperparameters of
# llm.c's scripts/run_gpt2_124M.sh (gpt2_124M.toml), on one machine.
# The data: data/fineweb.py, and data/hellaswag.py.
# run.sh explains how to start this script, and what the numbers mean. To expect:
#
#     validation loss   3.29 (llm.c's discussion 481); 3.2722 with llm.c of October 2024 (modded-nanogpt,
#                       records/101324_llmc); OpenAI's model on these tokens: 3.4250 (llm.c's
#                       dev/vislog.ipynb)
#     HellaSwag         29.9% (reports of discussion 481); OpenAI's model: 29.4%
#     time              8 A100: 300 ms a step, 94 minutes (its head); 8 H100: 139 ms a step
#                       (records/101324_llmc), which makes 44 minutes
#     traffic           M   a step    at most    whole run   data parallel: a step, whole run
#                       2   0.642 MB  11 MB      12.1 GB     249 MB, 4.7 TB
#                       4   0.963 MB  16.4 MB    18.2 GB     373 MB, 7.04 TB
#                       8   1.12 MB   19.2 MB    21.2 GB     436 MB, 8.22 TB
#     memory            -b 64 29 GB, -b 32 15 GB (the .toml's), -b 8 5 GB
#     host memory       4 GB while eight processes start; then, for checkpoints, 2.7 GB a worker, and
#                       0.5 GB where the model is written
[ -f scripts/run.sh ] || { echo "error: no scripts/run.sh: start this from the folder of the program" >&2; exit 2; }
RUN=gpt2_124M exec scripts/run.sh "$@"
