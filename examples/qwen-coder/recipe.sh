#!/usr/bin/env bash
# Train an exit head of Qwen2.5-Coder 1.5B Instruct on a CPU.
#
#   ./recipe.sh WORK_DIR [STEPS] [OPTIONS of eesd-distill, such as --mlp 0]
#
# The same command continues a stopped run. The first figures of acceptance come after minutes, and the last line of each portion shows
# the remaining time.
set -euo pipefail

work=$1 steps=${2:-4000}
here=$(dirname "$0")
model=$work/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf
mkdir -p "$work"
python "$here/../fetch.py" "$here/requirements.txt" "$model"
[ -f "$work/texts/prompts.jsonl" ] ||
    python "$here/texts.py" "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" -o "$work/texts"

# glibc would give large blocks back to the system, and the next step would clear their pages again.
export MALLOC_MMAP_THRESHOLD_=8000000000 MALLOC_TRIM_THRESHOLD_=16000000000

# The model continues code, fills it in, answers questions about it, and writes the same number of prompts itself. Two thirds of its
# texts are greedy, because most code is generated greedily.
exec eesd-distill --model "$model" --self-generate "$work/texts/prompts.jsonl" --self-prompt 2000 --own-rows 4096 --length 512 \
    --temperatures 0,0,0.7 --top-k 32 --batch 4 --validation "$work/texts/validation.jsonl" --validation-prompts 36 --validation-tokens 64 \
    --steps "$steps" --seed 1 --output "$work/head" "${@:3}"
