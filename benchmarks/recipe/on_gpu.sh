#!/usr/bin/env bash
# Runs everything that needs a GPU within ten minutes: the GPU tests, the presets beside torchtitan, and the planner.
#
#     benchmarks/recipe/on_gpu.sh                                  on an H100: tests, 1B and 3B, eight layouts of 1B
#     PARTS=presets benchmarks/recipe/on_gpu.sh                    on an H200: 8B, in bfloat16 and in float8
#     PARTS=candidates benchmarks/recipe/on_gpu.sh                 what could make a step of 8B faster, in two minutes
#     WHEELS=wheels benchmarks/recipe/on_gpu.sh                    no network: installs missing packages from wheels/
#     PRESETS=cpu-tiny benchmarks/recipe/on_gpu.sh                 a trial on a CPU
#
# PARTS    of tests, candidates, presets and planned, in this order    default: all but candidates, which times the parts
#          of a step beside other ways (benchmarks.recipe.candidates), also FlashAttention 3 and 4 where they are
#          installed. By their sources, torch 2.11 and 2.13 take flash-attn-4 up to 4.0.0b18
# PRESETS  the presets to train            default: gpu-1b gpu-3b; from 100 GiB on gpu-8b gpu-8b-float8
# ONLY     the peers beside each preset: trainer, lit, titan    default: titan
# PLANNED  the preset for benchmarks.planner.planned               default: the first of PRESETS
# WHEELS   a folder with wheels of all packages that python3 lacks: requirements.txt, the peers', and their dependencies;
#          the tests need pytest, pytest-timeout, pytest-xdist and transformers as well
# OUT      the folder for the log and results  default: outputs/on_gpu
# If a part fails or takes too long, the others still run. Nothing runs longer than ten minutes in all. The last lines
# show each part's exit code.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
parts=" ${PARTS:-tests presets planned} "
for word in $parts; do
  [[ $word == tests || $word == candidates || $word == presets || $word == planned ]] ||
    { echo "PARTS = $PARTS has $word; use some of tests, candidates, presets and planned" >&2; exit 2; }
done
out="${OUT:-outputs/on_gpu}"
mkdir -p "$out"
exec > >(tee "$out/log") 2>&1
unset PYTHONSAFEPATH # with it Python would find the peer's package of our name
if [[ -n "${WHEELS:-}" ]]; then
  packages="$(mktemp -d)"
  trap 'rm -rf "$packages"' EXIT
  python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$packages" "$WHEELS"/*.whl || exit
  export PYTHONPATH="$packages${PYTHONPATH:+:$PYTHONPATH}" PYTHON=python3
fi
PYTHON="$(scripts/setup_env.sh requirements.txt)" || exit
export PYTHON
ended=()
trap 'kill -KILL -- "-$!" 2> /dev/null; exit 130' INT TERM # each part has a process group

part() { # its time limit in seconds, its name, its command
  local limit="$1" name="$2" begin=$SECONDS left=$((595 - SECONDS)) status
  if ((left < limit)); then limit=$((left > 0 ? left : 1)); fi
  echo "== $name"
  # KILL, because after a TERM train.py finishes its step, and would run beside the next part.
  timeout -s KILL "$limit" "${@:3}" &
  wait "$!"
  status=$?
  ended+=("$name: exit code $status after $((SECONDS - begin)) s")
}

gib="$("$PYTHON" -c '
import torch
print(torch.cuda.get_device_properties(0).total_memory >> 30 if torch.cuda.is_available() else 0)')"
presets="${PRESETS:-$( ((gib < 100)) && echo gpu-1b gpu-3b || echo gpu-8b gpu-8b-float8)}"
if [[ $parts == *" tests "* ]] && ((gib > 0)); then
  part 200 tests "$PYTHON" -m pytest -q -p no:cacheprovider --durations=5 --numprocesses 8 tests/*/gpu
  part 30 kernels "$PYTHON" -m benchmarks.recipe.kernels
fi
if [[ $parts == *" candidates "* ]]; then
  candidates=("$PYTHON" -m benchmarks.recipe.candidates)
  ((gib > 0)) || candidates=(env OMP_NUM_THREADS=1 "${candidates[@]}" --tiny)
  part 120 candidates "${candidates[@]}"
fi
if [[ $parts == *" presets "* ]]; then
  for preset in $presets; do
    # shellcheck disable=SC2086  # ONLY may hold several words
    part 290 "$preset" "$PYTHON" -m benchmarks.recipe.peers --preset "$preset" --repeats 1 --only ${ONLY:-titan} --profile "$out"
  done
fi
if [[ $parts == *" planned "* ]]; then
  ((gib > 0)) && dtype=bfloat16 || dtype=float32
  part 60 probe env NGPU="${NGPU:-1}" "$PYTHON" -m torchtitan probe --dtype "$dtype" --out "$out/here.toml"
  part 200 planned "$PYTHON" -m benchmarks.planner.planned "${PLANNED:-${presets%% *}}" --count 8 \
    --cluster "$out/here.toml" --out "$out/planned.json"
fi
printf '%s\n' '== ended' "${ended[@]}"
[[ "${ended[*]}" != *"exit code "[1-9]* ]]
