#!/usr/bin/env bash
# GPT-2 124M on the GPUs of one machine, as WORKERS workers of RANKS GPUs each.
#     scripts/run_gpt2_124M.sh                       two workers of four GPUs: Streaming DiLoCo, tried out
#     WORKERS=1 RANKS=8 scripts/run_gpt2_124M.sh     one worker of eight: plain data parallel, to compare with
# Run it from the folder of the program, which starts all processes by itself. What it trains stands in
# gpt2_124M.toml; options given to this script win, e.g. `scripts/run_gpt2_124M.sh -x 1000 --overlap 5`.
# The data are token shards as llm.c's dev/data/fineweb.py writes them, or data/prepare.py from your own text.
set -euo pipefail

PROGRAM=${PROGRAM:-./train_gpt} # ./train_gpt_cpu where there is no GPU
CONFIG=${CONFIG:-scripts/gpt2_124M.toml}
TRAIN_DATA=${TRAIN_DATA:-data/fineweb10B/fineweb_train_*.bin}
VAL_DATA=${VAL_DATA:-data/fineweb10B/fineweb_val_*.bin}
OUT=${OUT:-log/gpt2_124M}
WORKERS=${WORKERS:-2}
RANKS=${RANKS:-4}
BATCH=${BATCH:-64} # sequences a GPU takes at once: less where its memory is small
TOKENS=${TOKENS:-524288} # in a step of all workers; a multiple of WORKERS x RANKS x BATCH x 1024

fail() {
    echo "error: $1" >&2
    exit 2
}
command -v "$PROGRAM" >/dev/null || fail "there is no $PROGRAM: run make train_gpt, or set PROGRAM"
for name in WORKERS RANKS BATCH TOKENS; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || fail "$name is '${!name}': set it to a whole number"
done

exec "$PROGRAM" --config "$CONFIG" -i "$TRAIN_DATA" -j "$VAL_DATA" -o "$OUT" \
    --workers "$WORKERS" --ranks "$RANKS" -b "$BATCH" -d $((TOKENS / WORKERS)) "$@"
