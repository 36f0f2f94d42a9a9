#!/usr/bin/env bash
# Train the exit head of SmolLM2-135M-Instruct on the model's own text and on text that it reads.
#
#   lab/smollm2/recipe.sh PROMPTS.jsonl TEXTS WORK_DIR [STEPS]
#   lab/smollm2/recipe.sh --further PROMPTS.jsonl ASKED.jsonl TEXTS WORK_DIR [STEPS]
#
# prompts.py writes PROMPTS.jsonl; texts.py writes TEXTS and ASKED.jsonl. The first command trains a head in WORK_DIR/head, on two CPU
# cores in two and a half hours; give it the texts of `texts.py --part 0.2`. The second command continues from that head in
# WORK_DIR/further, and is for a GPU; give it `prompts.py --every` and `texts.py --every --part 1.8 --times 3 --asked`. The same command
# continues a stopped run. With more STEPS, or more files in TEXTS, the first command continues a finished run.
set -euo pipefail

further=
if [ "$1" = --further ]; then further=1; shift; fi
prompts=(--self-generate "$1")
if [ -n "$further" ]; then prompts+=(--self-generate "$2"); shift; fi
texts=$2 work=$3 steps=${4:-}
model=$work/SmolLM2-135M-Instruct.Q4_1.gguf
examples=$(dirname "$0")/../../examples
python "$examples/fetch.py" "$examples/smollm2/requirements.txt" "$model"

# glibc would give large blocks back to the system, and the next step would clear their pages again.
export MALLOC_MMAP_THRESHOLD_=8000000000 MALLOC_TRIM_THRESHOLD_=16000000000

have_written() { # have_written OWN_TEXT OPTIONS: the model's own text
    eesd-distill --model "$model" "${prompts[@]}" --own-text "$1" --length 768 --temperatures 0,0,0.7 --seed 1 --steps 1 \
        --output "$work/writing" "${@:2}"
    for file in "$1"/shard-*.safetensors "$texts"/*.jsonl; do data+=(--data "$file"); done
}

data=()
if [ -z "$further" ]; then
    # The model writes 4,096 texts: half an hour on two cores. Then a run at a constant learning rate; its head is the mean of the
    # weights. The frozen model's targets are computed once.
    have_written "$work/own-text" --self-prompt 3000 --own-rows 4096 --own-batch 128
    exec eesd-distill --model "$model" "${data[@]}" --offline "$work/targets" --exit-layer 2 --draft-vocab 8192 --batch 4 --length 768 \
        --top-k 32 --steps "${steps:-6500}" --warmup 0.002 --cooldown 0 --seed 1 --output "$work/head"
fi
# 103,600 texts, in three minutes on an H200. Training sees each token once or twice, so the targets are computed beside it.
have_written "$work/more-text" --own-rows 103600 --own-batch 4096
exec eesd-distill --model "$model" "${data[@]}" --init-head "$work/head" --draft-vocab 8192 --batch 16 --length 768 --lr 0.005 \
    --top-k 32 --steps "${steps:-9300}" --warmup 0.004 --cooldown 0 --seed 1 --output "$work/further"
