#!/usr/bin/env bash
# Trains the same small GPT on the same text in three ways (data-parallel, DiLoCo, Streaming DiLoCo), each
# with two processes on this machine; compares cost and result, and draws both. `make demo` calls this script,
# which writes to demo/ only.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
out=demo

# The model and the data that all three share.
model=(
    --layers 4 --heads 4 --channels 128   # 0.8M parameters: learns words and some grammar in a minute or two
    -t 128                                # characters it sees: a sentence or two
    -b 8                                  # sequences a step on each process
    -x "${STEPS:-1000}"                   # steps; STEPS=80: a trial of this script
    --seed 1337                           # the same initial weights and the same order of the text
)
# The inner optimizer: Muon for the layers' matrices, AdamW for the rest.
inner=(
    --optimizer muon --muon-lr 0.01 --muon-momentum 0.9
    -l 0.002 -u 50                        # AdamW's learning rate; 50 steps to warm both up
    -k cosine -q 0.1                      # fall to a tenth: the workers' copies come together at the end
    -c 0.1                                # weight decay
)
# DiLoCo, classic and streaming. The outer rates are those that were best in a longer run (dev/results/README.md).
outer=(
    -H 20                                 # steps between two exchanges of a fragment; the paper: 30 and 100
    --outer-lr 1 --outer-momentum 0.4     # the paper: 0.4 and 0.9, which suit runs of far more steps
    --local-weight 0                      # a merged fragment is taken over as it is
)
# Classic: everything is one fragment, sent in fp32 and waited for.
classic=(--fragment-layers 0 --outer-dtype fp32 --overlap 0)
# Streaming: two layers a fragment, in four bits, merged two steps later.
streaming=(--fragment-layers 2 --outer-dtype fp4_e2m1 --overlap 2)

# Validation: eight times, the same 640 sequences in all runs. A worker validates by itself, in batches of -b;
# data-parallel ranks share the work, so that their batches are twice as large and half as many.
validate_every=$((${STEPS:-1000} / 8))
validation_batches=80
sample_length=400

say() {
    printf '\n== %s\n' "$*"
}

# train NAME OPTIONS...: one run, its logs and model in demo/NAME, in place of an earlier demo's
train() {
    local name=$1
    shift
    rm -rf "${out:?}/$name"
    ./train_gpt_cpu -i "$out/text/*_train_*.bin" -j "$out/text/*_val_*.bin" -o "$out/$name" \
        "${model[@]}" "${inner[@]}" -v "$validate_every" "$@"
}

say "The text: the King James Bible as bytes, a twentieth of it held out for validation."
"$python" data/prepare.py --tokenizer bytes --out "$out/text"

say "1 of 3, data-parallel: two processes share their gradients in every step."
train data-parallel --workers 1 --ranks 2 -m $((validation_batches / 2)) -s 0

say "2 of 3, DiLoCo: two workers train apart and exchange the whole model in fp32 now and then."
train diloco --workers 2 -m "$validation_batches" "${outer[@]}" "${classic[@]}" -s 0

say "3 of 3, Streaming DiLoCo: fragment after fragment in four bits, while training continues; then it writes a sample."
train streaming --workers 2 -m "$validation_batches" "${outer[@]}" "${streaming[@]}" \
    -s 1000000 -g "$sample_length"   # a sample at the end only

say "What it cost and what came of it. Data-parallel sends fp32 here; in bf16 it would send half."
"$python" dev/tools/compare.py "$out/data-parallel" "$out/diloco" "$out/streaming"
echo
"$python" dev/tools/plot.py "$out/data-parallel" "$out/diloco" "$out/streaming" -o "$out/losses.png"
