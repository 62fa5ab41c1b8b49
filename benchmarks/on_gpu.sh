#!/usr/bin/env bash
# Runs everything that needs a GPU within ten minutes: the GPU tests, the presets with profiles, and the peers.
#
#     benchmarks/on_gpu.sh
#     WHEELS=wheels benchmarks/on_gpu.sh                          no network: installs missing packages from wheels/
#     PRESETS=cpu-tiny PEERS=cpu-tiny benchmarks/on_gpu.sh        a trial on a CPU
#
# PRESETS  the presets for benchmarks.run      default: gpu-8b gpu-8b-float8 gpu-1b; gpu-1b on less than 100 GiB
# PEERS    the presets for benchmarks.peers    default: the first of PRESETS; "" for none
# PLANNED  the preset for benchmarks.plan.planned   default: the last of PRESETS
# ONLY     the peers: trainer, lit, titan      default: titan
# WHEELS   a folder with wheels of all packages that python3 lacks: requirements.txt, the peers', and their dependencies
# OUT      the folder for logs and results     default: outputs/on_gpu
# If a part fails or takes too long, the others still run. Nothing runs longer than ten minutes in all. The last lines
# show each part's exit code.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
out="${OUT:-outputs/on_gpu}"
mkdir -p "$out"
if [[ -n "${WHEELS:-}" ]]; then
  packages="$(mktemp -d)"
  python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$packages" "$WHEELS"/*.whl || exit
  export PYTHONPATH="$packages${PYTHONPATH:+:$PYTHONPATH}" PYTHON=python3
fi
PYTHON="$(scripts/setup_env.sh requirements.txt)" || exit
export PYTHON
ended=()

part() { # its time limit in seconds, its name, its command
  local limit="$1" name="$2" begin=$SECONDS left=$((595 - SECONDS)) status
  if ((left < limit)); then limit=$((left > 0 ? left : 1)); fi
  echo "== $name"
  # KILL, because after a TERM train.py finishes its step, and would run beside the next part.
  timeout -s KILL "$limit" "${@:3}" 2>&1 | tee "$out/$name.log"
  status=$?
  ended+=("$name: exit code $status after $((SECONDS - begin)) s")
}

gib="$("$PYTHON" -c '
import torch
print(torch.cuda.get_device_properties(0).total_memory >> 30 if torch.cuda.is_available() else 0)')"
if ((gib > 0)); then
  part 200 tests "$PYTHON" -m pytest -q --durations=5 tests/gpu
fi
if ((gib > 0 && gib < 100)); then echo "== this GPU has $gib GiB, but gpu-8b needs 118"; fi
presets="${PRESETS-$( ((gib < 100)) && echo gpu-1b || echo gpu-8b gpu-8b-float8 gpu-1b)}"
for preset in $presets; do
  part 150 "$preset" "$PYTHON" -m benchmarks.run "$preset" --profile --out "$out"
  if [[ " ${PEERS-${presets%% *}} " == *" $preset "* ]]; then
    # shellcheck disable=SC2086  # ONLY may hold several words
    part 180 "peers-$preset" "$PYTHON" -m benchmarks.peers --preset "$preset" --repeats 1 --only ${ONLY:-titan}
  fi
done
part 60 probe env NGPU="${NGPU:-1}" "$PYTHON" -m torchtitan probe --dtype bfloat16 --out "$out/here.toml"
part 150 planned "$PYTHON" -m benchmarks.plan.planned "${PLANNED:-${presets##* }}" --cluster "$out/here.toml" --out "$out/planned.json"
printf '%s\n' '== ended' "${ended[@]}"
[[ "${ended[*]}" != *"exit code "[1-9]* ]]
