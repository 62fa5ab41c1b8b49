# The image for Docker, Run:ai, Kubernetes and containers under Slurm: the code and all packages that it needs.
#
#     docker build -t torchtitan .
#     docker run --rm --gpus all --shm-size 8g torchtitan                                    # trains the debug model
#     mkdir -p outputs && chmod a+rwx outputs      # the image runs as user 1000
#     docker run --rm --gpus all --shm-size 8g -v "$PWD/outputs:/workspace/outputs" torchtitan ./run_llama_train.sh --training.steps 20
#
# Layers that change least come first: system, packages, code. torch brings its CUDA libraries; the host needs only the
# driver.
FROM python:3.11-slim-bookworm

# torch.compile needs g++: Triton and Inductor build small libraries at run time. sshd is for scripts/ssh_node.sh. Debian
# keeps no old versions to pin.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ openssh-server \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /workspace
COPY requirements.txt ./
COPY titan_fleet/requirements.txt titan_fleet/
RUN pip install --no-cache-dir --disable-pip-version-check -r requirements.txt -r titan_fleet/requirements.txt

# Run:ai may start the container as yet another user, without home or name. So caches go to /tmp, and runs and downloads
# to folders that every user may write.
RUN useradd --create-home --uid 1000 trainer && install --directory --mode 1777 outputs assets
ENV PYTHON=/usr/local/bin/python3 LOGNAME=trainer TRITON_CACHE_DIR=/tmp/triton HF_HOME=/tmp/huggingface
COPY . .
USER 1000
CMD ["./run_llama_train.sh"]
