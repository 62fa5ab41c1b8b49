#!/usr/bin/env bash
# Train from one TOML file, on every GPU of this machine or on its CPU. Installs missing packages first.
#
#     ./run_llama_train.sh --training.steps 20
#     CONFIG_FILE=train_configs/llama3_8b.toml NGPU=8 ./run_llama_train.sh
#     NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 ./run_llama_train.sh    # on the other node: NODE_RANK=1
#
# CONFIG_FILE  the TOML file (default: train_configs/debug_model.toml)
# NGPU         number of processes, one for each GPU (default: all GPUs; without a GPU, 1 process on the CPU)
# NNODES       number of machines (default: 1); more than one needs NODE_RANK and MASTER_ADDR
# NODE_RANK    number of this machine, 0 to NNODES-1
# MASTER_ADDR  address of node 0, which all nodes reach
# MASTER_PORT  port of node 0 (default: 29500; under Slurm, 20000 + the last four digits of the job's id)
# COMM_MODE    fake_backend: a dry run of NNODES x NGPU ranks in one process, on any machine (--comm.mode)
# MAX_RESTARTS how often torchrun restarts the run after a rank has died (default: 0). With --checkpoint.enable the run
#              resumes from its newest checkpoint, else it starts again at step 0
# RDZV_TIMEOUT seconds that a node waits for the others (default: 900)
# PREFLIGHT    1: before training, check that all nodes reach each other and run the same code and configuration
# LOG_RANK     ranks of each node whose output is shown, for example 0,1 (default: 0)
# DRY_RUN      1: check the configuration, print the command, and start nothing
# PYTHON       the Python to use (default: .venv beside this file, else python3, else a new .venv)
#
# The script also reads the variables of PyTorchJob, Kubeflow Trainer, Run:ai, Slurm and SkyPilot (docs/launching.md).
# All arguments go to train.py; --help lists its options.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

if [[ -n "${CONFIG_FILE:-}" && $PWD != "$here" && $CONFIG_FILE != /* && -e $CONFIG_FILE ]]; then
  export CONFIG_FILE="$PWD/$CONFIG_FILE" # relative to the caller's folder
fi
py="$("$here/scripts/setup_env.sh" requirements.txt)"
cd "$here"
exec "$py" -m torchtitan.launch.node "$@"
