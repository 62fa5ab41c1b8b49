"""Reads the model of a checkpoint as named tensors, and writes one, a tensor at a time."""

import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from torchtitan.checkpoint.storage import Manifest, Storage
from torchtitan.weights.tensors import Weights

_MODEL, _AVERAGE = "model.", "average."  # prefixes of a parameter's name in a checkpoint


def open_checkpoint(storage: Storage, step: int) -> Weights:
    """The model of a checkpoint, under the model's names: the average of its weights, where the run kept one."""
    reader = storage.reader(step)
    metadata = reader.read_metadata()
    outline = {
        name.removeprefix(_MODEL): torch.empty(kind.size, dtype=kind.properties.dtype, device="meta")
        for name, kind in metadata.state_dict_metadata.items()
        if name.startswith(_MODEL) and isinstance(kind, TensorStorageMetadata)
    }

    def fill(name: str, tensor: Tensor) -> None:
        planner = DefaultLoadPlanner()  # what dcp.load does, less its collectives and reading the metadata every time
        place = _AVERAGE if _AVERAGE + name in metadata.state_dict_metadata else _MODEL
        planner.set_up_planner({place + name: tensor.detach()}, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()

    return Weights(storage.folder(step), outline, fill)


def save_checkpoint(weights: Weights, storage: Storage, config: dict[str, Any], dtype: torch.dtype | None) -> None:
    """Write the model as the checkpoint of step 0, holding one tensor at a time."""
    outline = {_MODEL + name: like.to(dtype or like.dtype) for name, like in weights.outline.items()}
    writer = storage.writer(0)
    writer.single_file_per_rank = False  # a file a tensor: torch keeps what it has written until the file is closed
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended
        dcp.save(outline, storage_writer=writer, planner=_ReadingPlanner(weights, dtype), no_dist=True)
    files = storage.describe(storage.being_written(0), storage.names(storage.being_written(0)))
    storage.complete(Manifest(0, files, config, layout="1 rank", versions={"torch": torch.__version__}, run={}))


class _ReadingPlanner(DefaultSavePlanner):
    """Plans with tensors on the meta device, and reads each when it is written."""

    def __init__(self, weights: Weights, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._weights, self._dtype = weights, dtype

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._weights.read(index.fqn.removeprefix(_MODEL), self._dtype)
