#!/usr/bin/env bash
# Train the exit head of SmolLM2-135M-Instruct on the model's own text. The same command continues a stopped run.
#
#   ./recipe.sh PROMPTS.jsonl WORK_DIR [OPTION OF eesd-distill ...]
#
# PROMPTS.jsonl has one conversation a line, {"messages": [{"role": "user", "content": "..."}]}; README.md says which were used.
# The model writes 1,525 more itself, which begin like the tasks below.
set -euo pipefail

prompts=$1 work=$2
shift 2
model=$work/SmolLM2-135M-Instruct.Q4_1.gguf
python "$(dirname "$0")/fetch.py" "$model"

starts=("" "" "" "" "Translate German to English: " "Summarize the following text: "
    $'Answer the question using this passage.\n\nPassage: ' "Write a Python function " "Write a short story about "
    "Explain " "What is " "Who " "Solve this problem step by step: " "Rewrite this text: " "Imagine you are " "Compare ")
for start in "${starts[@]}"; do self+=(--self-prompt-start "$start"); done

# glibc would give large blocks back to the system, and the next step would clear their pages again.
export MALLOC_MMAP_THRESHOLD_=8000000000 MALLOC_TRIM_THRESHOLD_=16000000000

# The targets of the frozen model are computed once, and read in every pass over the text.
exec eesd-distill --model "$model" --exit-layer 4 --deep none --draft-vocab 8192 \
    --self-generate "$prompts" --self-prompt 1500 "${self[@]}" \
    --own-text "$work/own-text" --own-rows 3072 --own-batch 128 --length 512 --temperatures 0,0.7 \
    --offline "$work/targets" --batch 4 --steps 6000 --dtype bfloat16 --seed 1 \
    --output "$work/head" "$@"
