"""Reads a checkpoint without running code from it, and tells whether it holds the model that is asked for.

Only a run that reads a checkpoint loads this file.
"""

import io
import json
import pickle
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata

from torchtitan.refusal import Refusal, blaming


class _WithoutTrust:
    """Reads the index of a checkpoint. torch unpickles it, which could run any code; here few classes are allowed."""

    def read_metadata(self: Any, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(), "rb") as file:
            text = io.BytesIO(file.read())
        with blaming(f"{self.path}: reading its index, .metadata,"):
            metadata = _IndexUnpickler(text).load()
            metadata.state_dict_metadata = dict(metadata.state_dict_metadata)
        for name, kind in metadata.state_dict_metadata.items():
            if not isinstance(kind, TensorStorageMetadata):  # torch would unpickle it
                raise Refusal(
                    f"{self.path}: {name} is no tensor, and reading it could run any code; save it again as a tensor"
                )
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class Reader(_WithoutTrust, FileSystemReader):
    """Reads from a disk."""


class RemoteReader(_WithoutTrust, FsspecReader):
    """Reads from an fsspec URL."""


class _IndexUnpickler(pickle.Unpickler):
    _ALLOWED = {
        "torch.distributed.checkpoint.metadata": {
            "Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
            "BytesStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING"},
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch": {"Size", "float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8", "bool", "strided"},
        "torch.serialization": {"_get_layout"},
        "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # Python 3.13 alone uses this name
        if name not in self._ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"the checkpoint's index names {module}.{name}, which no index needs; refused")
        return super().find_class(module, name)


def differences(shapes: Mapping[str, torch.Size], tensors: Mapping[str, Tensor]) -> list[str]:
    """What this rank asks for and the checkpoint does not have in that shape."""
    missing = [f"{name} is missing there" for name in tensors if name not in shapes]
    return missing + [
        f"{name} is {list(shapes[name])} there, {list(tensor.shape)} here"
        for name, tensor in tensors.items()
        if name in shapes and shapes[name] != tensor.shape
    ]


def unknown(shapes: Mapping[str, torch.Size], tensors: Mapping[str, Tensor], group: Any) -> list[str]:
    """What no rank asks for, among the kinds (model, optimizer) that are loaded; called by all ranks."""
    # The run may have fewer streams now, and a stage of a pipeline no experts: all ranks take the same names.
    kinds = {name.partition(".")[0] for name in tensors} - {"data", "experts"}
    names = [name for name in shapes if name.partition(".")[0] in kinds]
    known = torch.tensor([name in tensors for name in names], dtype=torch.int32)
    dist.all_reduce(known, dist.ReduceOp.MAX, group=group)
    return [f"{name} is in no rank's model" for name, k in zip(names, known.tolist(), strict=True) if not k]


def another_model(place: str, wrong: list[str], saved: Mapping[str, Any], now: Mapping[str, Any]) -> Refusal:
    """`saved` and `now`: the section [model] of the checkpoint and of the run."""
    shown = [said for said in wrong if said.startswith("model.")] or wrong  # the optimizer's states follow the model's
    listed = "; ".join(shown[:4]) + (f"; and {len(shown) - 4} more" if len(shown) > 4 else "")
    elsewhere = "start elsewhere (job.dump_folder, or checkpoint.initial_load_path)"
    if not shown[0].startswith("model."):
        fix = f'set checkpoint.exclude_from_loading = ["optimizer"], or {elsewhere}'
        return Refusal(f"{place} holds states of another optimizer: {listed}; use the optimizer that saved them, {fix}")
    keys = [key for key in saved if key != "hf_assets_path" and saved[key] != now.get(key)]
    pairs = [f"model.{key} = {json.dumps(saved[key])}, and this run has {json.dumps(now.get(key))}" for key in keys]
    why = f"it was saved with {'; '.join(pairs)}; use what it was saved with"
    if not keys:
        why = f"model.name = {json.dumps(now.get('name'))} is the same, so its code has changed; take back what changed"
    return Refusal(
        f"{place} holds another model, or a part of one: {listed}; {why}, resume from another step "
        f"(checkpoint.load_step), or {elsewhere}"
    )
