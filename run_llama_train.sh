#!/usr/bin/env bash
# Trains what one TOML file describes, on every GPU of this machine or on its CPU. Installs what is missing into .venv.
#
#     ./run_llama_train.sh --training.steps 20
#     CONFIG_FILE=train_configs/llama3_8b.toml NGPU=8 ./run_llama_train.sh
#     NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 ./run_llama_train.sh    # on the other machine: NODE_RANK=1
#
# CONFIG_FILE  the TOML file                       default: train_configs/debug_model.toml
# NGPU         processes on this machine           default: one a GPU; without a GPU, 1 on the CPU
# NNODES       number of machines                  default: 1
#              With more than one, set NODE_RANK (0 to NNODES-1) and MASTER_ADDR (an address of node 0), too.
# MASTER_PORT  port on which node 0 listens        default: 29500; under Slurm 20000 + last 4 digits of the job id
# COMM_MODE    fake_backend: one process plays all NNODES x NGPU ranks, on any machine (--comm.mode)
# MAX_RESTARTS how often torchrun restarts the run after a rank died  default: 0
#              It resumes from the newest checkpoint, or starts at step 0 without --checkpoint.enable.
# RDZV_TIMEOUT seconds a node waits for the others  default: 900
# PREFLIGHT    1: first check that all nodes reach each other and are alike
# PROBE        1: measure devices and links on all nodes, write a cluster file for the planner, and train nothing
#              Options are then those of `python -m torchtitan probe`, such as --out clusters/here.toml.
# PREFLIGHT_SECRET  a word that only this run's nodes know (default: the run id)
# LOG_RANK     local ranks whose output each node shows, such as 0,1  default: 0
# PRINT_ONLY   1: check the configuration, print the command and start nothing (also under its older name DRY_RUN)
# DOWNLOAD     1: fetch the tokenizer if its folder has none, with HF_TOKEN; OWNER/NAME: from this repository
# PYTHON       the Python to use                   default: .venv beside this file, else python3, else a new .venv
# The script also reads the variables of PyTorchJob, Kubeflow Trainer, Run:ai, Slurm and SkyPilot (docs/recipe/launching.md).
# All options go to train.py; --help lists its sections, and --help training the keys of one.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

if [[ -n "${CONFIG_FILE:-}" && $PWD != "$here" && $CONFIG_FILE != /* && -e $CONFIG_FILE ]]; then
  export CONFIG_FILE="$PWD/$CONFIG_FILE" # relative to the caller's folder
fi
if [[ $# == 1 && ($1 == --help || $1 == -h) ]]; then
  sed -n '2,/^set -euo/ { /^#/ s/^# \{0,1\}//p; }' "$0"
  echo
fi
py="$("$here/scripts/setup_env.sh" requirements.txt)"
cd "$here"
if [[ "${DOWNLOAD:-0}" != 0 && "${PRINT_ONLY:-${DRY_RUN:-0}}" == 0 ]]; then
  "$py" -m torchtitan.tools.hub.fetch "$DOWNLOAD" "${CONFIG_FILE:-train_configs/debug_model.toml}" "$@"
fi
if [[ "${PROBE:-0}" != 0 ]]; then exec "$py" -m torchtitan probe "$@"; fi
exec "$py" -m torchtitan.tools.start "$@"
