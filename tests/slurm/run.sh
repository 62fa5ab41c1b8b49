#!/usr/bin/env bash
# multinode_trainer.slurm on a real Slurm: two nodes, each with a name and an address of its own, all of it on this machine.
#
#     sudo tests/slurm/run.sh                 every trial, about four minutes on two cores
#     sudo tests/slurm/run.sh told preempted  of trains, told, preempted, out_of_time, fails: the first and these
#
# PYTHON   the Python to use  default: as for run_llama_train.sh
# HOLD     seconds for which this Slurm holds a requeued job  default: 10; that of Slurm itself is 120
# KEEP     a new folder that keeps logs, metrics and checkpoints
# TIMEOUT  seconds after which it is ended, whatever it does  default: 900
# Debian or Ubuntu as root: Slurm's packages are installed if they are missing. All daemons run in network, process and
# mount namespaces made for this: a Slurm that is here already is not touched, and when this ends, however, so do they.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
say() { echo "tests/slurm/run.sh: $*" >&2; }

[[ $EUID == 0 ]] || { say "needs root, for namespaces and daemons; run it by sudo"; exit 2; }
missing=()
for program in slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge ip:iproute2 unshare:util-linux; do
  command -v "${program%:*}" >/dev/null || missing+=("${program#*:}")
done
if ((${#missing[@]})); then
  command -v apt-get >/dev/null || { say "needs ${missing[*]}; install them and run this again"; exit 2; }
  say "installing ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
unshare --net --mount --pid --fork --mount-proc true || { say "may not make namespaces here (a container without rights?)"; exit 2; }
PYTHON="$(scripts/setup_env.sh requirements.txt)"
export PYTHON

folder="${KEEP:-$(mktemp -d)}"
mkdir -p "$folder"
folder="$(cd "$folder" && pwd)"
[[ -z "$(ls -A "$folder")" ]] || { say "KEEP = $folder is not empty; name a new folder"; exit 2; }
stop() { # with unshare ends the first process inside (--kill-child), and with that every process inside
  { kill -KILL "${inside:-}" && wait "$inside"; } 2>/dev/null || true
  [[ -n "${KEEP:-}" ]] || rm -rf "$folder"
}
trap stop EXIT
trap 'exit 130' INT TERM
unshare --net --mount --pid --uts --ipc --fork --kill-child --mount-proc \
  "$PYTHON" -m tests.slurm.trials "$folder" "${HOLD:-10}" "${TIMEOUT:-900}" "$@" &
inside=$!
wait "$inside"
