"""Loss on held-out data: the same batches every time, each token counted once, on however many ranks."""

import torch
from torch.distributed import ProcessGroup

from torchtitan.config.schema import Validation
from torchtitan.data.loader import Loader
from torchtitan.parallel.collectives import sum_over
from torchtitan.training.step import ForwardBackward


def validate(
    step: ForwardBackward, loader: Loader, config: Validation, device: torch.device, batch_group: ProcessGroup
) -> tuple[float, int]:
    """Mean loss and number of tokens over the first `steps` batches of the data, or over all of it.

    The loader ends on all ranks at once, so every rank runs the same number of forward passes, which FSDP needs.
    """
    loader.reset()
    num_batches = config.steps
    totals: torch.Tensor | None = None
    while num_batches and (batch := loader.next()) is not None:
        num_batches -= 1
        numbers = step.evaluate(batch.to(device), config.local_batch_size)
        totals = numbers if totals is None else totals + numbers
    if totals is None:
        raise ValueError("the validation data holds no tokens; see validation.dataset and validation.dataset_path")
    summed, tokens = sum_over(totals, batch_group).tolist()
    return summed / max(1, tokens), int(tokens)
