#!/usr/bin/env bash
# Train the exit head of SmolLM2-135M-Instruct on the model's own text and on text that it reads.
#
#   ./recipe.sh PROMPTS.jsonl TEXTS WORK_DIR [STEPS]
#
# PROMPTS.jsonl is what prompts.py writes, TEXTS what texts.py writes. The same command continues a stopped run, and with more STEPS,
# or more files in TEXTS, a finished one.
set -euo pipefail

prompts=$1 texts=$2 work=$3 steps=${4:-6500}
model=$work/SmolLM2-135M-Instruct.Q4_1.gguf
python "$(dirname "$0")/fetch.py" "$model"

# glibc would give large blocks back to the system, and the next step would clear their pages again.
export MALLOC_MMAP_THRESHOLD_=8000000000 MALLOC_TRIM_THRESHOLD_=16000000000

# The model writes 4,096 texts: half an hour on two cores.
eesd-distill --model "$model" --self-generate "$prompts" --self-prompt 3000 --own-text "$work/own-text" --own-rows 4096 \
    --own-batch 128 --length 768 --temperatures 0,0,0.7 --seed 1 --steps 1 --output "$work/writing"

# A run at a constant rate, whose head is the mean of its weights. The frozen model's targets are computed once.
data=()
for file in "$work"/own-text/shard-*.safetensors "$texts"/*.jsonl; do data+=(--data "$file"); done
exec eesd-distill --model "$model" "${data[@]}" --offline "$work/targets" --exit-layer 2 --draft-vocab 8192 --batch 4 --length 768 \
    --top-k 32 --steps "$steps" --warmup 0.002 --cooldown 0 --seed 1 --output "$work/head"
