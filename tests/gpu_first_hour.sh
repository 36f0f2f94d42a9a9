#!/usr/bin/env bash
# What to run first on an NVIDIA GPU. It writes one page; please send it to the project.
#
#   tests/gpu_first_hour.sh [MODEL [PAGE]]
#
# MODEL is a model directory with its exit head (default: the bundled one), PAGE the file to write (default: gpu-first-hour.md).
# GPU=no tries the script itself on a machine without one: torch runs what plans would, and the tests are only collected.
set -uo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
model=${1:-$root/examples/pycode/model}
page=$(realpath "${2:-gpu-first-hour.md}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=()

# step TITLE COMMAND...: run it, and write its exit code, its seconds and the end of its output to the page.
step() {
    local title=$1 started=$SECONDS
    shift
    echo "$title" >&2
    local output code
    output=$("$@" 2>&1)
    code=$?
    grep -q "^tokens differ" <<<"$output" && code=1
    ((code)) && failed+=("$title")
    printf '\n## %s\n\n`%s`: exit code %s, %s s\n\n```\n%s\n```\n' \
        "$title" "${*//$work\//}" "$code" "$((SECONDS - started))" "$(tail -n 40 <<<"$output")" >>"$page"
}

installed() { python -c "import $1" 2>/dev/null; }

flavours=()
installed tensorrt && flavours+=(tensorrt)
installed tensorrt_rtx && flavours+=(tensorrt-rtx)
if [[ ${GPU:-yes} == yes ]]; then
    gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
    ((gpus)) || { echo "There is no NVIDIA GPU here; GPU=no tries the script without one." >&2; exit 2; }
    backend=tensorrt shape=7b check=--check dtype=float16 tokens=200 many=1500 sampling=(--device cuda) collect=
else
    gpus=1 backend=torch shape=tiny check= dtype=bfloat16 tokens=24 many=24 sampling=(--device cpu --vocab 1000 --passes 2)
    collect=--collect-only
    # torch's products for AMX add in another order in longer calls, so that the step on bits would fail, rightly.
    export ONEDNN_MAX_CPU_ISA=AVX512_CORE
fi

# With so many slots, attention in plans reads half of them until a text has about 1260 tokens, and then all.
slots=2560
longer=$work/model
cp -rs "$(realpath "$model")" "$longer"
python - "$longer/config.json" "$slots" <<'END'
import json, pathlib, sys
path, slots = pathlib.Path(sys.argv[1]), int(sys.argv[2])
config = json.loads(path.read_text())
config["max_position_embeddings"] = max(config["max_position_embeddings"], slots)
path.unlink()  # a link to the model's
path.write_text(json.dumps(config))
END

printf '# First hour on a GPU\n\n%s, commit %s\n' "$(date -u +%F)" "$(git -C "$root" rev-parse --short HEAD)" >"$page"
step "The machine" eesd-doctor
step "The tests for GPUs" python -m pytest -q $collect -p no:cacheprovider "$root/tests/test_gpu.py" "$root/tests/test_device_sampler.py" \
    "$root/tests/test_device_rejection.py"
for stages in 1 2; do
    ((stages > gpus)) && continue
    plain=$work/plain-$stages
    step "Export, $stages stages" eesd-export --model "$longer" --dtype "$dtype" --stages "$stages" --max-seq-len "$slots" -o "$plain"
    step "torch, $stages stages: drafting changes nothing" \
        eesd-run --engine-dir "$plain" --backend torch -p "def main(" -n "$tokens" --ignore-eos --compare
    for flavour in "${flavours[@]}"; do
        plans=$work/$flavour-$stages name="$flavour, $stages stages"
        cp -r "$plain" "$plans"
        step "$name: build" eesd-build "$plans" --target "$flavour" $check
        [[ $backend == tensorrt ]] && step "$name: layers" eesd-inspect "$plans" --layers
        step "$name: bits" eesd-inspect "$plans" --exact --backend "$backend"
        run=(eesd-run --engine-dir "$plans" --backend "$backend" -p "def main(" --ignore-eos)
        step "$name: chains change nothing" "${run[@]}" -n "$tokens" --compare
        step "$name: a long text, where attention comes to read more slots" "${run[@]}" -n "$many" --compare
        step "$name: trees change nothing" "${run[@]}" -n "$tokens" --compare --exact --tree-budget
        step "$name: sampling changes nothing" "${run[@]}" -n "$tokens" --compare --temperature 0.7
        step "$name: rejection sampling runs" "${run[@]}" -n "$tokens" --temperature 0.7 --sampling rejection
        command -v compute-sanitizer >/dev/null && step "$name: races" compute-sanitizer --tool racecheck "${run[@]}" -n 8
    done
done
step "Passes against the memory's bandwidth" python -m eesd.bench.tools.shapes --shape "$shape" --backend "$backend"

step "Sampling: the tokens of the host, and the time" python -m eesd.bench.tools.device_sampling "${sampling[@]}"

printf '\n## Failed\n\n%s\n' "$( ((${#failed[@]})) && printf '* %s\n' "${failed[@]}" || echo nothing)" >>"$page"
echo "${#failed[@]} steps failed; $page has the details." >&2
((!${#failed[@]}))
