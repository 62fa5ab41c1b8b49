#!/usr/bin/env bash
# Train as one TOML file says, on every GPU of this machine or on its CPU; sets up what is missing.
#
#     ./run_llama_train.sh --training.steps 20
#     CONFIG_FILE=train_configs/llama3_8b.toml NGPU=8 ./run_llama_train.sh
#
# CONFIG_FILE  the TOML file                     default: train_configs/debug_model.toml
# NGPU         processes, one a GPU              default: the GPUs there are; without any, 1 on the CPU
# COMM_MODE    fake_backend: a dry run of NGPU ranks in one process, on any machine (--comm.mode)
# MAX_RESTARTS how often torchrun brings the run back after a rank has died; it goes on from its newest checkpoint
# LOG_RANK     ranks whose lines are shown: 0,1  default: 0
# PYTHON       the Python to use                 default: .venv beside this file, else python3, else a new .venv
# Everything after the name goes to train.py; --help lists it.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
die() { echo "$(basename "$0"): $*" >&2; exit 2; }

config="${CONFIG_FILE:-train_configs/debug_model.toml}"
if [[ $PWD != "$here" && $config != /* && -e $config ]]; then config="$PWD/$config"; fi # as the caller sees it
py="$("$here/scripts/setup_env.sh" requirements.txt)"
cd "$here"

[[ -z "${COMM_MODE:-}" ]] || set -- --comm.mode "$COMM_MODE" "$@"
dry_run=no
for arg in "$@"; do
  case "$arg" in
    fake_backend | --comm.mode=fake_backend) dry_run=yes ;;
    --help | -h) exec "$py" train.py --job.config_file "$config" "$@" ;;
    --job.config[_-]file*) die "$arg: the file is named by CONFIG_FILE=... here" ;;
  esac
done

gpus="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)"
if [[ $gpus != 0 && -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then
  gpus="$(tr -d ' ' <<<"$CUDA_VISIBLE_DEVICES" | tr ',' '\n' | grep -c '^[0-9GM]' || true)" # indices, GPU-... or MIG-... names
fi
ngpu="${NGPU:-$((gpus > 0 ? gpus : 1))}"
[[ $ngpu =~ ^[1-9][0-9]*$ ]] || die "NGPU = $ngpu is no number of processes; use 1 or more"
restarts="${MAX_RESTARTS:-0}"
[[ $restarts =~ ^[0-9]+$ ]] || die "MAX_RESTARTS = $restarts is no number of restarts; use 0 or more"
[[ $dry_run == yes ]] || ((gpus == 0 || ngpu <= gpus)) || die "NGPU = $ngpu is more than the $gpus GPUs here; use $gpus or fewer"

# Without torch and before any rank exists, so that a mistake is shown at once and once.
"$py" -m torchtitan check --world_size "$ngpu" -- --job.config_file "$config" "$@"

if [[ $dry_run == yes ]]; then
  export WORLD_SIZE="$ngpu"
  exec "$py" train.py --job.config_file "$config" "$@"
fi
if ((gpus == 0)); then # freed memory is kept for the next step: fresh pages cost a tenth of a step (docs/performance.md)
  export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-1073741824}"
  export MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-1073741824}" MALLOC_TOP_PAD_="${MALLOC_TOP_PAD_:-67108864}"
fi
if ((gpus == 0 && ngpu > 1)) && [[ -z "${OMP_NUM_THREADS:-}" ]]; then # else every rank takes every core
  cores="$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)"
  export OMP_NUM_THREADS=$((cores > ngpu ? cores / ngpu : 1))
fi
echo "training $config, NGPU=$ngpu (NVIDIA GPUs here: $gpus)"
if ((ngpu == 1 && restarts == 0)); then
  exec "$py" train.py --job.config_file "$config" "$@"
fi
if ((restarts > 0)); then export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; fi # a store for each try: pytorch issue 135712
exec "$py" -m torch.distributed.run --nproc_per_node="$ngpu" --max_restarts="$restarts" \
  --rdzv_backend c10d --rdzv_endpoint=localhost:0 \
  --local-ranks-filter "${LOG_RANK:-0}" --role rank --tee 3 train.py --job.config_file "$config" "$@"
