#!/usr/bin/env bash
# The figures of the reports that need a GPU, one job after another. A job that has ended is not run again, and an interrupted comparison
# goes on where it stopped.
#
#   benchmarks/on_gpu.sh MODEL DATA OUT [JOB ...]
#
# MODEL is Qwen2.5-Coder-1.5B-Instruct, on the hub or as a directory; DATA has local copies of the benchmarks (see --data-dir). Records and
# logs go to OUT. Without jobs all of them are run, in the order below; LIMIT (600 by default) bounds the seconds of each, and WORKERS (6) is
# the number of runs of a comparison at a time. SEEDS, METHODS and TASKS, in quotes, are those of comparisons.
set -uo pipefail

JOBS="tests trl ragged profile draws fresh decode questions growth main shift boolq rivals post-hoc unstopped small frontier linearised load harness widths"
SEEDS=${SEEDS:-0 1 2}
LIMIT=${LIMIT:-600}
WORKERS=${WORKERS:-6}
PYTHON=${PYTHON:-python3}

if [ $# -lt 3 ]; then
  echo "usage: $0 MODEL DATA OUT [JOB ...]; jobs: $JOBS" >&2
  exit 2
fi
model=$1 data=$2 out=$3
shift 3
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"

bayeslora() { timeout "$LIMIT" "$PYTHON" -m bayeslora "$@"; }
script() { name=$1; shift; timeout "$LIMIT" "$PYTHON" "$here/$name.py" "$@"; }

TASKS=${TASKS:-arc-challenge arc-easy openbookqa winogrande-m winogrande-s}
TRIALS="lora=1:1 lora-plus=1:1 adalora=1:2 mc-dropout=1:1 checkpoint-ensemble=1:1 swag=1:2 bbb=1:1 blob=1:1 c-lora=1:1 monteclora=1:1 pvera=0.2:2"
METHODS=${METHODS:-bayesian-lora lora deep-ensemble temperature blob lora-plus adalora mc-dropout checkpoint-ensemble swag bbb c-lora monteclora pvera zero-shot}

# the trials of the methods that are compared
trials() { for trial in $TRIALS; do case " $METHODS " in *" ${trial%%=*} "*) echo "$trial" ;; esac; done; }

# a comparison with letters: compare STUDY TASKS METHODS [options]
compare() {
  study=$1 tasks=$2 methods=$3
  shift 3
  # runs share a GPU: torch is not to keep memory in gaps between batches of many lengths
  # shellcheck disable=SC2086
  PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True bayeslora compare --model "$model" --data-dir "$data" --scoring letter --batch-tokens 16384 --workers "$WORKERS" --seeds $SEEDS \
    --out "$out/$study" --tasks $tasks --methods $methods "$@"
}

job_tests() { # what only a GPU runs of the tests
  (cd "$here/.." && timeout "$LIMIT" "$PYTHON" -m pytest -q tests/posterior/test_philox.py tests/posterior/test_capture.py tests/train/test_head_loss.py tests/adapter/test_lean_layers.py tests/adapter/test_rotary.py tests/train/test_graphed_pass.py)
}
job_trl() {
  gunzip -c "$data/wikitext2/train.txt.gz" > "$out/train.txt"
  script against_trl --model "$model" --text "$out/train.txt" --batches 8x512 --contestants trl bayesian-lora lora --out "$out/trl-1.5b.json" &&
    script against_trl --model llama2-7b --batches 8x512 --steps 12 --contestants trl bayesian-lora --out "$out/trl-7b.json"
}
job_ragged() {
  gunzip -c "$data/wikitext2/train.txt.gz" > "$out/train.txt"
  script against_trl --model "$model" --text "$out/train.txt" --batches 16x512 --ragged --contestants trl trl-by-length bayesian-lora \
    --out "$out/trl-1.5b-ragged.json"
}
job_profile() {
  script where_time_goes --train --model qwen2.5-1.5b --batch 8x512 --targets q_proj k_proj v_proj o_proj --out "$out/train-profile-1.5b.json"
}
bench() { bayeslora bench "$@" --targets q_proj k_proj v_proj o_proj; }
job_draws() {
  bench predict redraw cold --model qwen2.5-1.5b --batches 1x128 8x128 --samples 1 4 --repeats 10 --out "$out/qwen2.5-1.5b-draws.json" &&
    bench predict --model llama2-7b --batches 1x128 8x128 --samples 1 4 --draw-layers all 0.75 0.5 0.25 --repeats 8 --out "$out/llama2-7b-draws.json"
}
job_fresh() {
  bench redraw cold --model llama2-7b --batches 1x128 --samples 4 --repeats 8 --out "$out/llama2-7b-fresh.json"
}
job_decode() {
  bench decode --model qwen2.5-1.5b --batches 1x128 8x128 --samples 1 4 --repeats 5 --new-tokens 16 --out "$out/qwen2.5-1.5b-decode.json"
}
job_questions() {
  bench questions --model qwen2.5-1.5b --questions 256 --samples 1 4 --repeats 5 --out "$out/qwen2.5-1.5b-questions.json"
}
job_growth() {
  bench growth --model qwen2.5-1.5b --batches 8x128 --samples 4 --repeats 5 --figures "$out/growth" --out "$out/qwen2.5-1.5b-growth.json"
}
job_main() { # the main table
  # shellcheck disable=SC2046
  compare main "$TASKS" "$METHODS" --eval-every 8 --unfamiliar-by none --trials $(trials)
}
job_shift() {
  compare shift openbookqa "bayesian-lora lora deep-ensemble blob zero-shot" --eval-every 8 --trials lora=1:1 blob=1:1 \
    --shift arc-challenge arc-easy mmlu-cs mmlu-eng mmlu-law mmlu-health
}
job_boolq() {
  # shellcheck disable=SC2046
  compare boolq boolq "$METHODS" --eval-every 8 --unfamiliar-by none --max-train 1280 --trials $(trials)
}
job_rivals() { # ivon has settings of its own
  compare ivon "$TASKS" ivon --eval-every 8 --unfamiliar-by none --trials ivon=0.4:1 --settings sample_size=1e8 &&
    compare ivon-boolq boolq ivon --eval-every 8 --unfamiliar-by none --max-train 1280 --trials ivon=0.4:1 --settings sample_size=1e8
}
job_post-hoc() { # methods that are made of a trained LoRA
  compare post-hoc "$TASKS" "lora tfb laplace laplace-last-layer" --eval-every 8 --unfamiliar-by none --trials lora=1:1
}
job_unstopped() { # training without early stopping
  for epochs in 4 8; do
    compare "epochs-$epochs" "arc-challenge winogrande-s" "lora blob bayesian-lora" --unfamiliar-by none --patience 0 \
      --epochs "$epochs" --eval-every "$epochs" || return
  done
}
job_small() { # a model of 135M, with early stopping
  bayeslora compare --model smollm2 --data-dir "$data" --batch-tokens 32768 --workers "$WORKERS" --seeds $SEEDS --out "$out/small" \
    --tasks arc-easy arc-challenge openbookqa winogrande-s --max-train 1280 --methods lora bayesian-lora ivon swag --unfamiliar-by none
}
trained() { find "$out/main/runs/arc-challenge/bayesian-lora" -type d -name 'seed-*' | sort | head -n 1; }
job_frontier() {
  script frontier "$(trained)" --cuts all 0.75 0.5 0.25 --data-dir "$data" --timed 256 --repeats 3 --out "$out/frontier-1.5b.json"
}
job_linearised() {
  script linearised_draws "$(trained)" --data-dir "$data" --questions 64 --draws 4 16 --repeats 1 --out "$out/linearised-1.5b.json"
}
job_load() {
  script serve_load --run "${RUN:-$(trained)}" --texts 64 --clients 16 --requests 400 --out "$out/serve-1.5b.json"
}
job_harness() { # real questions, with options as texts
  bayeslora train --model "$model" --data-dir "$data" --task arc-easy --max-train 512 --epochs 1 --eval-every 8 --calibrate none \
    --unfamiliar-by none --batch-tokens 16384 --out "$out/harness" &&
    script harness "$out/harness" --data-dir "$data" --questions 512 --samples 1 4 --repeats 3 --warmup 1 --batch-size 128 \
      --batch-tokens 16384 --out "$out/harness-1.5b.json"
}
job_widths() { # is a width that suits a 1.5B model right for one of 135M?
  script splits "$data" "$out/splits" &&
    script grid --tasks "$out/splits/obqa" "$out/splits/arcc" "$out/splits/arce" --seeds 0 --workers "$WORKERS" --runs "$out/widths" \
      --out "$out/widths-smollm2.json" \
      --common "--model smollm2 --scoring text --batch-tokens 16384 --calibrate none --unfamiliar-by none --eval-every 8" \
      --variant "4 components, width 0.01: --settings width=0.01" --variant "4 components, width 0.03: --settings width=0.03" \
      --variant "4 components, width 0.1: --settings width=0.1" --variant "4 components, width 0.3: --settings width=0.3" \
      --variant "1 component, width 0.1: --preset free --settings width=0.1" \
      --variant "1 component, width 0.3: --preset free --settings width=0.3" \
      --variant "1 component, width 1: --preset free --settings width=1" --variant "lora: --method lora --epochs 1" \
      --variant "lora, 2 epochs: --method lora --epochs 2"
}

failed=0
for job in ${*:-$JOBS}; do
  case " $JOBS " in *" $job "*) ;; *) echo "$0: no job $job; jobs: $JOBS" >&2; exit 2 ;; esac
  [ -e "$out/$job.done" ] && continue
  echo "$(date +%T) $job"
  if "job_$job" > "$out/$job.log" 2>&1; then touch "$out/$job.done"; else echo "$(date +%T) $job failed, see $out/$job.log" >&2; failed=1; fi
done
exit $failed
