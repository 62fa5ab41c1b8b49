"""The third of the four places where a run is refused (docs/architecture.md): what this machine and its packages cannot
do, and what the way the run was started rules out.
"""

from pathlib import Path

import torch

from torchtitan.checkpoint.storage import Storage
from torchtitan.config.schema import Config
from torchtitan.models.stages import V_SHAPED
from torchtitan.refusal import Refusal


def check_machine(config: Config, device: torch.device, reads_text: bool = True) -> None:
    """Refuse a configuration that this machine cannot run, before anything starts."""
    if config.metrics.enable_wandb:
        from torchtitan.observe.weights_and_biases import import_wandb

        import_wandb()
    if config.compile.enable:
        from torchtitan.parallel.compiler import check_compiler

        check_compiler(config, device)
    if config.checkpoint.enable:
        _check_places(config)
    if config.float8 is not None:
        from torchtitan.parallel.float8 import check_float8

        check_float8(config.float8, device)
    if config.parallelism.pipeline_parallel_memory_gib and config.parallelism.pipeline_parallel_layer_counts is None:
        fix = "start with ./run_llama_train.sh, or set pipeline_parallel_layer_counts to what a dry run finds"
        raise Refusal(f"parallelism.pipeline_parallel_memory_gib says what ranks may hold, but not the cut; {fix}")
    schedule, degree = config.parallelism.pipeline_parallel_schedule, config.parallelism.pipeline_parallel_degree
    if not reads_text and degree > 1 and torch.__version__ < "2.13":
        why = f"for a model of your own: {torch.__version__} wants a gradient of all that goes from stage to stage"
        raise Refusal(f"parallelism.pipeline_parallel_degree = {degree} needs torch 2.13 {why}")
    folded = degree > 1 and schedule in V_SHAPED
    if folded and device.type == "cpu" and torch.__version__ < "2.13":
        raise Refusal(
            f'parallelism.pipeline_parallel_schedule = "{schedule}" needs torch 2.13 on a CPU: {torch.__version__} '
            f"begins with a message from a rank to itself, which gloo cannot carry; use Interleaved1F1B, or torch 2.13"
        )
    early = config.optimizer.early_step_in_backward and config.training.enable_cpu_offload
    if early and device.type == "cuda" and torch.__version__ < "2.13":
        raise Refusal(
            f"optimizer.early_step_in_backward = true with training.enable_cpu_offload = true needs torch 2.13 on a "
            f"GPU: {torch.__version__} updates a parameter before its gradient is on the host; set one to false"
        )
    if config.parallelism.enable_async_tensor_parallel and device.type != "cuda":
        raise Refusal(
            "parallelism.enable_async_tensor_parallel = true needs GPUs that reach each other's memory; set it to false"
        )
    if config.profiling.enable_memory_snapshot and device.type != "cuda":
        raise Refusal("profiling.enable_memory_snapshot = true needs a GPU: only CUDA records memory; set it to false")


def _check_places(config: Config) -> None:
    for key in ("folder", "initial_load_path"):
        place = getattr(config.checkpoint, key) or ""
        if "://" in place:
            Storage(place)
        elif key == "initial_load_path" and place and not Path(place).exists():
            from torchtitan.weights.files import DOWNLOADS, find_files

            if not find_files(place):
                looked = f"looked from {Path.cwd()}, and in {DOWNLOADS}"
                raise Refusal(f'checkpoint.initial_load_path = "{place}" is not there ({looked})')
