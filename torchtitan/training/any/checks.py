"""Refuses or says what depends on how a batch is divided, because the recipe promises that nothing does."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal
from torchtitan.training.run import Run


def check(model: nn.Module, run: Run) -> None:
    pieces = run.dims.dp * run.batch.num_local_batches
    if run.dims.pp > 1:
        pieces *= run.config.training.local_batch_size // run.config.parallelism.pipeline_parallel_microbatch_size
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and pieces > 1 and module.track_running_stats:
            is_synced = isinstance(module, nn.SyncBatchNorm)
            if is_synced and run.dims.pp == 1 and run.batch.num_local_batches == 1:
                continue
            raise Refusal(
                f"{name} is a {type(module).__name__}, whose numbers depend on the batch, and this layout divides a "
                f"batch into {pieces} pieces, so it would train another model than one process; use GroupNorm or "
                "LayerNorm, or on GPUs with data parallelism alone nn.SyncBatchNorm.convert_sync_batchnorm in build"
            )
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 and run.place.world_size > 1:
            logger.info(
                f"{name} is a {type(module).__name__}: what it drops depends on the ranks, so the loss will not be the "
                "same to the digit on another layout"
            )
            return
