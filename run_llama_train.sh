#!/usr/bin/env bash
# Train as one TOML file says, on every GPU of this machine or on its CPU; sets up what is missing.
#
#     ./run_llama_train.sh --training.steps 20
#     CONFIG_FILE=train_configs/llama3_8b.toml NGPU=8 ./run_llama_train.sh
#     NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 ./run_llama_train.sh    # and NODE_RANK=1 on the other
#
# CONFIG_FILE  the TOML file                     default: train_configs/debug_model.toml
# NGPU         processes, one a GPU              default: the GPUs there are; without any, 1 on the CPU
# NNODES       machines; more than one: NODE_RANK (0 to NNODES-1) and MASTER_ADDR (of node 0), too  default: 1
# MASTER_PORT  where the nodes meet              default: 29500; under Slurm 20000 + the last four digits of its id
# COMM_MODE    fake_backend: a dry run of NNODES x NGPU ranks in one process, on any machine (--comm.mode)
# MAX_RESTARTS how often torchrun brings the run back after a rank has died: from its newest checkpoint, without --checkpoint.enable from step 0
# RDZV_TIMEOUT seconds a node waits for the others  default: 900
# PREFLIGHT    1: first check, with the other nodes, that all reach each other and are alike
# LOG_RANK     ranks of each node whose lines are shown: 0,1  default: 0
# DRY_RUN      1: check the configuration and print the command, start nothing
# PYTHON       the Python to use                 default: .venv beside this file, else python3, else a new .venv
# What PyTorchJob, Kubeflow Trainer, Run:ai, Slurm and SkyPilot set is understood as well (docs/launching.md).
# Everything after the name goes to train.py; --help lists it.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

if [[ -n "${CONFIG_FILE:-}" && $PWD != "$here" && $CONFIG_FILE != /* && -e $CONFIG_FILE ]]; then
  export CONFIG_FILE="$PWD/$CONFIG_FILE" # as the caller sees it
fi
py="$("$here/scripts/setup_env.sh" requirements.txt)"
cd "$here"
room=launch
if [[ "${PREFLIGHT:-0}" != 0 ]]; then room=preflight; fi
exec "$py" -m "torchtitan.$room.start" "$@"
