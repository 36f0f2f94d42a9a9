#!/bin/sh
# The gain of every way to draft, side by side, in one run for each model. Sets up engine directories in build/, and continues
# where it stopped. It needs the environment's commands in PATH, and an idle machine: other programs spoil the times.
#
#   lab/drafts.sh SPEC_BENCH.jsonl [CELL ...]
#
# Cells: float32, bfloat16, int8 (SmolLM2-135M), pycode (bundled).
# Minutes on two idle cores: 8, 5, 4, 2; and one for each engine directory that is still missing.
set -eu
questions=$1
shift
[ $# -gt 0 ] || set -- float32 bfloat16 int8 pycode
export_engines() { [ -e "$1/manifest.json" ] || eesd-export --output "$@"; }
measure() { # NAME, DIRECTORY, more options
    name=$1 quantized=$2
    shift 2
    python -m lab.spec_bench --engine-dir "$quantized" --method exit --method text --method both --bits \
        --samplings "greedy coupled coupled-1" --kernels avx512 --kernels avx2 --resume -o "bench/results/drafts-$name.json" "$@"
}
smollm2=build/SmolLM2-135M-Instruct.Q4_1.gguf
for cell; do
    case $cell in
    float32 | bfloat16 | int8)
        own="--dtype $cell --quantize none"
        [ "$cell" = int8 ] && own="--dtype float32 --quantize int8"
        [ "$cell" = int8 ] && four= || four="--quantize-draft int4 --symmetric"
        # The file already has levels of 4 bits, and the draft rounds their values a second time: the worst case.
        export_engines "build/smollm2-$cell-quantized" --model $smollm2 $own $four --exit-head quantized
        export_engines "build/smollm2-$cell-head" --model $smollm2 $own $four --exit-head examples/smollm2/head
        measure "smollm2-$cell" "build/smollm2-$cell-quantized" --method "build/smollm2-$cell-head:exit" --method "build/smollm2-$cell-head:both" \
            --questions "$questions" --questions examples/smollm2/prompts.jsonl --per-category 10 --others 2 -n 40
        ;;
    pycode)
        export_engines build/pycode-quantized --model examples/pycode/model --dtype float32 --exit-head quantized
        export_engines build/pycode-head --model examples/pycode/model --dtype float32
        measure pycode build/pycode-quantized --method build/pycode-head:exit --method build/pycode-head:both \
            --questions bench/measure/tasks.jsonl --per-category 12 --others 4 -n 64
        ;;
    *)
        echo "drafts.sh: there is no cell '$cell'" >&2
        exit 2
        ;;
    esac
done
