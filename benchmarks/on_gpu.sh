#!/usr/bin/env bash
# What has to run on a GPU, in one go and within ten minutes: the GPU's tests, the presets with their profiles, the peers.
#
#     benchmarks/on_gpu.sh
#     WHEELS=wheels benchmarks/on_gpu.sh                          no network: what python3 lacks comes from this folder
#     PRESETS=cpu-tiny PEERS=cpu-tiny benchmarks/on_gpu.sh        the same on a CPU
#
# PRESETS  what benchmarks.run is given        default: gpu-8b gpu-8b-float8 gpu-1b; gpu-1b on less than 100 GiB
# PEERS    those given to benchmarks.peers     default: the first preset; "" for none
# ONLY     which peers: trainer, lit, titan    default: titan
# WHEELS   what python3 lacks of requirements.txt and of the peers' packages, with what those need themselves
# OUT      where logs and results go           default: outputs/on_gpu
# A part that fails or takes too long does not end the others, and none goes on after ten minutes; the last lines say which.
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

part() { # its seconds at most, its name, its command
  local limit="$1" name="$2" begin=$SECONDS left=$((595 - SECONDS)) status
  if ((left < limit)); then limit=$((left > 0 ? left : 1)); fi
  echo "== $name"
  # KILL: train.py takes a TERM for a warning and ends after its step, beside the next part.
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
if ((gib > 0 && gib < 100)); then echo "== $gib GiB on this GPU: gpu-8b needs 118"; fi
presets="${PRESETS-$( ((gib < 100)) && echo gpu-1b || echo gpu-8b gpu-8b-float8 gpu-1b)}"
for preset in $presets; do
  part 150 "$preset" "$PYTHON" -m benchmarks.run "$preset" --profile --out "$out"
  if [[ " ${PEERS-${presets%% *}} " == *" $preset "* ]]; then
    # shellcheck disable=SC2086  # several words
    part 180 "peers-$preset" "$PYTHON" -m benchmarks.peers --preset "$preset" --repeats 1 --only ${ONLY:-titan}
  fi
done
printf '%s\n' '== ended' "${ended[@]}"
[[ "${ended[*]}" != *"exit code "[1-9]* ]]
