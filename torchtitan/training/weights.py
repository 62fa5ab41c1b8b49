"""Where a path leads: to a run's checkpoint, a Hugging Face folder or Meta's files, opened alike, read when asked."""

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from torchtitan.checkpoint.hf import (
    SHARD_BYTES,
    Weights,
    copy_assets,
    copy_part,
    open_checkpoint,
    open_hf,
    read_json,
    save_hf,
)
from torchtitan.checkpoint.storage import Manifest, Storage
from torchtitan.config.schema import Config, Job, Model
from torchtitan.data.prompts import follow_training
from torchtitan.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan.models.llama.args import FLAVORS, LlamaArgs, resolve_vocab_size
from torchtitan.models.llama.hf import from_hf_config, from_meta_params, from_meta_parts, to_hf_config, to_hf_name
from torchtitan.models.llama.model import Transformer
from torchtitan.parallel.pipeline import ModelParts
from torchtitan.refusal import Refusal


@dataclass(frozen=True)
class StoredModel:
    """A model that is stored somewhere."""

    weights: Weights  # under the model's names, complete
    args: LlamaArgs
    assets: Path  # folder of the tokenizer and generation_config.json
    dtype: torch.dtype  # what to compute in
    config: Config | None = None  # the run's
    place: tuple[Storage, Manifest] | None = None

    @property
    def trained_here(self) -> bool:
        """Whether this recipe has trained the model. Step 0 is a new model, or one that was only converted."""
        return self.place is not None and self.place[1].step > 0

    def reading(self) -> AbstractContextManager:
        """Inside, a run that goes on does not remove the checkpoint."""
        return self.place[0].reading(self.place[1].step) if self.place else nullcontext()


def open_model(path: str) -> StoredModel:
    """The newest complete checkpoint of a run or of a folder of checkpoints, a step, or a download from elsewhere."""
    folder = Path(path)
    if (folder / "config.json").is_file():
        return _open_hf(folder)
    if (folder / "params.json").is_file():
        return _open_meta(folder)
    storage, step = find_checkpoints(path)
    passed_over = []
    for number in storage.steps() if step < 0 else [step]:
        manifest = storage.examine(number)
        if isinstance(manifest, Manifest):
            return open_run(storage, manifest)
        passed_over.append(f"step-{number}: {manifest}")
    why = "; ".join(passed_over) or "no checkpoint/step-N, config.json (Hugging Face) or params.json (Meta) in it"
    raise Refusal(f"{path} holds no model: {why}; name a run folder, a step's folder or a downloaded model")


def find_checkpoints(path: str) -> tuple[Storage, int]:
    """Storage of a run folder's checkpoints, or of a folder of checkpoints; and N if the path ends in step-N, or -1."""
    path = path.rstrip("/")
    above, _, name = path.rpartition("/")
    if step := re.fullmatch(r"step-(\d+)", name):
        return Storage(above or "."), int(step[1])
    of_run = Storage(f"{path}/checkpoint")
    return (of_run if of_run.steps() else Storage(path)), -1


def build_tokenizer_for(source: StoredModel, path: str | Path) -> Tokenizer:
    """The tokenizer there, if the model has a row for each of its ids."""
    tokenizer = build_tokenizer(path)
    resolve_vocab_size(source.args, None, tokenizer.vocab_size)
    return tokenizer


def outline_of(args: LlamaArgs) -> dict[str, Tensor]:
    """All parameters, on the meta device."""
    with torch.device("meta"):
        return dict(Transformer(args).named_parameters())


def check_shape(source: StoredModel, args: LlamaArgs) -> None:
    """Refuse weights of another model than a run's; max_seq_len may differ, no weight depends on it."""
    ours, theirs = asdict(args), asdict(replace(source.args, max_seq_len=args.max_seq_len))
    if differing := [f"{k} {theirs[k]}, this run's {ours[k]}" for k in ours if ours[k] != theirs[k]]:
        raise Refusal(
            f"{source.weights.where} holds another model: its {'; its '.join(differing)}; "
            f"choose model.flavor and model.vocab_size for it, or add its shape to models/llama/args.py"
        )


def load_weights(source: StoredModel, model: ModelParts) -> None:
    """Fill this rank's part of a model of the same shape."""
    for name, parameter in model.named_parameters():
        tied = source.args.tied_embeddings and name == "output.weight"  # on a stage of its own
        source.weights.fill("tok_embeddings.weight" if tied else name, parameter)


def write_hf(
    source: StoredModel, folder: str, assets: Path, dtype: torch.dtype | None, shard_bytes: int = SHARD_BYTES
) -> None:
    """A folder that transformers loads."""
    tokenizer = build_tokenizer_for(source, assets)
    stored = dtype or source.weights.outline["norm.weight"].dtype
    config = to_hf_config(source.args, stored, tokenizer.bos_id, tokenizer.eos_id)
    with TemporaryDirectory() as copy:
        copy_tokenizer(source, assets, Path(copy))
        save_hf(source.weights, folder, to_hf_name, config, copy, dtype, shard_bytes)


def copy_tokenizer(source: StoredModel, assets: Path, target: Path) -> None:
    """Copy the tokenizer's files. For a model that was trained here, make them begin a text as training did."""
    copy_assets(assets, target)
    if source.trained_here:
        follow_training(target)


def config_of(args: LlamaArgs, folder: str, assets: Path) -> Config:
    """A configuration to train or evaluate such a model with: its flavor, whatever vocabulary and length."""
    for name, flavors in FLAVORS.items():
        for flavor, known in flavors.items():
            if replace(known, vocab_size=args.vocab_size, max_seq_len=args.max_seq_len) == args:
                model = Model(name=name, flavor=flavor, vocab_size=args.vocab_size, hf_assets_path=str(assets))
                return Config(job=Job(dump_folder=folder), model=model)
    raise Refusal(f"no flavor has this model's shape; add it to FLAVORS in torchtitan/models/llama/args.py: {args}")


def open_run(storage: Storage, manifest: Manifest) -> StoredModel:
    config = Config.model_validate(manifest.config)
    args = FLAVORS.get(config.model.name, {}).get(config.model.flavor)
    weights = open_checkpoint(storage, manifest.step)
    if args is None:
        raise Refusal(
            f"{weights.where} is of {config.model.name} {config.model.flavor}, which models/llama/args.py does not have"
        )
    if (embedding := weights.outline.get("tok_embeddings.weight")) is not None:
        args = replace(args, vocab_size=len(embedding))
    weights.check(outline_of(args))
    dtype = getattr(torch, config.training.mixed_precision_param)
    return StoredModel(weights, args, Path(config.model.hf_assets_path), dtype, config, (storage, manifest))


def _open_hf(folder: Path) -> StoredModel:
    config = read_json(folder / "config.json")
    args = from_hf_config(config)
    weights, outline = open_hf(folder), outline_of(args)
    weights.check({to_hf_name(name): like for name, like in outline.items()})
    dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
    return StoredModel(weights.renamed({name: to_hf_name(name) for name in outline}), args, folder, dtype)


def _open_meta(folder: Path) -> StoredModel:
    """Weights from consolidated.*.pth, which stay on the disk until they are read."""
    paths = sorted(folder.glob("consolidated.*.pth"))
    parts: list[Mapping[str, Tensor]] = [
        torch.load(path, map_location="cpu", mmap=True, weights_only=True) for path in paths
    ]
    if not parts or "output.weight" not in parts[0]:
        raise Refusal(f"{folder} has params.json, but no consolidated.*.pth with a Llama in it; download all files")
    vocab_size = len(parts[0]["output.weight"]) * len(parts)
    args = from_meta_params(read_json(folder / "params.json"), vocab_size)
    names = outline_of(args)
    left_out = {"rope.freqs"} | ({"output.weight"} if args.tied_embeddings else set())
    outline = {}
    for name, part in parts[0].items():
        if name in names:
            outline[name] = torch.empty(_whole(part, names[name], len(parts)), dtype=part.dtype, device="meta")
        elif name not in left_out:
            outline[name] = part.to("meta")

    def fill(name: str, tensor: Tensor) -> None:
        whole = from_meta_parts(name, [part[name] for part in parts], names[name].shape, args)
        copy_part(tensor, lambda part: whole[part])

    weights = Weights(str(folder), outline, fill)
    weights.check(names)
    return StoredModel(weights, args, folder, outline["norm.weight"].dtype)


def _whole(part: Tensor, wanted: Tensor, count: int) -> torch.Size:
    """The shape of all parts together, split along the one dimension that is short."""
    if part.shape == wanted.shape or part.ndim != wanted.ndim:
        return part.shape
    short = [i for i in range(part.ndim) if part.shape[i] * count == wanted.shape[i] != part.shape[i]]
    return torch.Size(size * count if i in short[:1] else size for i, size in enumerate(part.shape))
