#!/usr/bin/env bash
# Tests multinode_trainer.slurm on a real Slurm: two nodes on this machine, each with its own name and address.
#
#     sudo tests/recipe/slurm/run.sh                 every trial, about four minutes on two cores
#     sudo tests/recipe/slurm/run.sh told preempted  some of trains (which always runs), told, preempted, out_of_time, fails
#
# PYTHON   the Python to use  default: as for run_llama_train.sh
# HOLD     seconds for which this Slurm holds a requeued job  default: 10; Slurm's own default is 120
# KEEP     a new or empty folder that keeps logs, metrics and checkpoints
# TIMEOUT  seconds after which the test ends in any case  default: 900
# Needs root on Debian or Ubuntu, and installs missing packages of Slurm. All daemons run in network, process and mount
# namespaces of their own: a Slurm on this machine is not touched, and the daemons end when this script ends.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
say() { echo "tests/recipe/slurm/run.sh: $*" >&2; }

[[ $EUID == 0 ]] || { say "namespaces and daemons need root; use sudo tests/recipe/slurm/run.sh"; exit 2; }
missing=()
for program in slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge ip:iproute2 unshare:util-linux; do
  command -v "${program%:*}" >/dev/null || missing+=("${program#*:}")
done
if ((${#missing[@]})); then
  command -v apt-get >/dev/null || { say "${missing[*]} missing, and there is no apt-get; install them and run this again"; exit 2; }
  say "installing ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
unshare --net --mount --pid --fork --mount-proc true || { say "the kernel refuses namespaces (a container without rights?); run this on a host"; exit 2; }
PYTHON="$(scripts/setup_env.sh requirements.txt)"
export PYTHON

folder="${KEEP:-$(mktemp -d)}"
mkdir -p "$folder"
folder="$(cd "$folder" && pwd)"
[[ -z "$(ls -A "$folder")" ]] || { say "KEEP = $folder is not empty; use a new folder"; exit 2; }
stop() { # killing unshare kills the first process inside (--kill-child), and so every process inside
  { kill -KILL "${inside:-}" && wait "$inside"; } 2>/dev/null || true
  [[ -n "${KEEP:-}" ]] || rm -rf "$folder"
}
trap stop EXIT
trap 'exit 130' INT TERM
unshare --net --mount --pid --uts --ipc --fork --kill-child --mount-proc \
  "$PYTHON" -m tests.recipe.slurm.trials "$folder" "${HOLD:-10}" "${TIMEOUT:-900}" "$@" &
inside=$!
wait "$inside"
