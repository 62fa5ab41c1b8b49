#!/usr/bin/env bash
# What has to run on a GPU, in one go and within ten minutes: the GPU's tests, the presets with their profiles, the peers.
#
#     benchmarks/on_gpu.sh
#     WHEELS=wheels benchmarks/on_gpu.sh                          no network: what python3 lacks comes from this folder
#     PRESETS=cpu-tiny PEERS=cpu-tiny benchmarks/on_gpu.sh        the same on a CPU
#
# PRESETS  what benchmarks.run is given        default: gpu-8b gpu-8b-float8 gpu-1b
# PEERS    what benchmarks.peers is given      default: gpu-8b gpu-1b
# ONLY     which peers: trainer, lit, titan    default: titan
# OUT      where logs and results go           default: outputs/on_gpu
# A part that fails or takes too long does not end the others, and none goes on after ten minutes; the last lines say which.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
out="${OUT:-outputs/on_gpu}"
mkdir -p "$out"
if [[ -n "${WHEELS:-}" ]]; then
  python3 -m pip install --quiet --no-index --no-deps --upgrade --target "$out/packages" "$WHEELS"/*.whl || exit
  export PYTHONPATH="$(realpath "$out/packages")" PYTHON=python3
fi
PYTHON="$(scripts/setup_env.sh requirements.txt)" || exit
export PYTHON
ended=()

part() { # its seconds at most, its name, its command
  local limit="$1" name="$2" begin=$SECONDS left=$((595 - SECONDS)) status
  if ((left < limit)); then limit=$((left > 0 ? left : 1)); fi
  echo "== $name"
  timeout "$limit" "${@:3}" 2>&1 | tee "$out/$name.log"
  status=$?
  ended+=("$name: exit code $status after $((SECONDS - begin)) s")
}

if "$PYTHON" -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; then
  part 120 tests "$PYTHON" -m pytest -q tests/gpu
fi
for preset in ${PRESETS:-gpu-8b gpu-8b-float8 gpu-1b}; do
  part 150 "$preset" "$PYTHON" -m benchmarks.run "$preset" --profile --out "$out"
done
for preset in ${PEERS:-gpu-8b gpu-1b}; do
  # shellcheck disable=SC2086  # several words
  part 180 "peers-$preset" "$PYTHON" -m benchmarks.peers --preset "$preset" --repeats 1 --only ${ONLY:-titan}
done
printf '%s\n' '== ended' "${ended[@]}"
[[ "${ended[*]}" != *"exit code "[1-9]* ]]
