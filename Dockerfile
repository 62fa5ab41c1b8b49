# The image for Docker, Run:ai, Kubernetes and Slurm's containers: the code, and all it needs at run time.
#
#     docker build -t torchtitan .
#     docker run --rm --gpus all --shm-size 8g torchtitan                                    # trains the debug model
#     mkdir -p outputs && chmod a+rwx outputs      # the image runs as user 1000
#     docker run --rm --gpus all --shm-size 8g -v "$PWD/outputs:/workspace/outputs" torchtitan ./run_llama_train.sh --training.steps 20
#
# Layers by how often they change: system, packages (torch brings its CUDA libraries; the host only the driver), code.
FROM python:3.11-slim-bookworm

# For torch.compile: Triton and Inductor build small libraries when they run. Debian keeps no old versions to pin.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /workspace
COPY requirements.txt ./
RUN pip install --no-cache-dir --disable-pip-version-check -r requirements.txt

# Run:ai may run it as another user still, who has no home and no name: caches go to /tmp, runs and downloads to folders
# open to all.
RUN useradd --create-home --uid 1000 trainer && install --directory --mode 1777 outputs assets
ENV PYTHON=/usr/local/bin/python3 LOGNAME=trainer TRITON_CACHE_DIR=/tmp/triton HF_HOME=/tmp/huggingface
COPY . .
USER 1000
CMD ["./run_llama_train.sh"]
