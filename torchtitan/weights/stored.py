"""Opens the model at a path: a run's checkpoint, a Hugging Face folder, or a publisher's own files.

All three are opened alike, and their weights are read when they are asked for.
"""

import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from torchtitan.checkpoint.storage import Manifest, Storage, find_checkpoints
from torchtitan.config.schema import OTHERS, Config, Job, Lora, Model, Parallelism, Whole
from torchtitan.data.tokenizers.files import load_json
from torchtitan.data.tokenizers.prompts import follow_training
from torchtitan.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from torchtitan.lora.names import is_adapter
from torchtitan.models.downloads import find_download
from torchtitan.models.families import SHAPE_KEYS, find_families, find_family, find_model
from torchtitan.models.spec import Blueprint, OtherFormat
from torchtitan.parallel.parts import ModelParts, copy_part
from torchtitan.refusal import Refusal
from torchtitan.weights.adapted import StoredAdapter, merged, open_base
from torchtitan.weights.base import Base, find_base
from torchtitan.weights.checkpoint import open_checkpoint, save_checkpoint
from torchtitan.weights.files import refusing_harm
from torchtitan.weights.hugging_face import SHARD_BYTES, copy_assets, open_hf, save_hf
from torchtitan.weights.stacks import stacked
from torchtitan.weights.targets import refuse_existing
from torchtitan.weights.tensors import Weights


@dataclass(frozen=True)
class StoredModel:
    """A model that is stored somewhere."""

    weights: Weights  # under the model's names, complete
    family: str  # the value of model.name
    blueprint: Blueprint
    assets: Path  # folder of the tokenizer and generation_config.json
    dtype: torch.dtype  # type to compute in
    config: Config | None = None  # the run's
    place: tuple[Storage, Manifest] | None = None
    adapter: StoredAdapter | None = None  # which the weights contain

    @property
    def trained_here(self) -> bool:
        """Whether this recipe has trained the model. Step 0 is a new model, or one that was only converted."""
        return self.place is not None and self.place[1].step > 0

    def reading(self) -> AbstractContextManager:
        """Inside this context, a running training does not remove the checkpoint."""
        return self.place[0].reading(self.place[1].step) if self.place else nullcontext()

    def plain_config(self, folder: str, assets: Path, degree: int = 1) -> Config:
        """A configuration to train, evaluate or run such a model with, at this degree of tensor parallelism."""
        model = as_section(self.family, self.blueprint, str(assets))
        return Whole(job=Job(dump_folder=folder), model=model, parallelism=Parallelism(tensor_parallel_degree=degree))


def open_model(path: str, family: str | None = None) -> StoredModel:
    """The newest complete checkpoint of a run or of a folder of checkpoints, a step, or a download from elsewhere.

    `family` is what model.name would be, for a download that does not tell it.
    """
    folder = Path(path)
    if folder.is_file():
        raise Refusal(f"{path} is a file, which tells no shape of a model; name a run, a step or a downloaded folder")
    if (folder / "config.json").is_file():
        return _open_hf(folder, family)
    for name, spec in find_families(family).items():
        for mark, open_folder in spec.other_formats.items():
            if (folder / mark).is_file():
                return _open_other(folder, name, open_folder)
    storage, step = find_checkpoints(path)
    passed_over = []
    for number in storage.steps() if step < 0 else [step]:
        manifest = storage.examine(number)
        if isinstance(manifest, Manifest):
            return open_run(storage, manifest)
        passed_over.append(f"step-{number}: {manifest}")
    why = "; ".join(passed_over) or "no checkpoint/step-N, config.json (Hugging Face) or params.json (Meta) in it"
    raise Refusal(f"{path} holds no model: {why}; name a run folder, a step's folder or a downloaded model")


def as_section(name: str, blueprint: Blueprint, hf_assets_path: str) -> Model:
    """The [model] section that describes this model: a flavor if one has its shape, otherwise every key."""
    shape = blueprint.shape
    kept = {"vocab_size": shape.vocab_size, "max_seq_len": shape.max_seq_len}
    for flavor, known in blueprint.spec.flavors.items():
        if replace(known, **kept) == shape:
            kept["max_seq_len"] = None if shape.max_seq_len == known.max_seq_len else shape.max_seq_len
            return Model(name=name, flavor=flavor, hf_assets_path=hf_assets_path, **kept)
    said = {field.name: getattr(shape, field.name) for field in fields(shape) if field.name in SHAPE_KEYS}
    return Model(name=name, hf_assets_path=hf_assets_path, **said)


def build_tokenizer_for(source: StoredModel, path: str | Path) -> Tokenizer:
    """The tokenizer at this path; refused if the model has fewer rows than the tokenizer has ids."""
    tokenizer = build_tokenizer(path)
    source.blueprint.with_vocabulary(tokenizer.vocab_size)
    return tokenizer


def outline_of(blueprint: Blueprint) -> dict[str, Tensor]:
    """All parameters, on the meta device."""
    with torch.device("meta"):
        return dict(blueprint.spec.build(blueprint.shape).named_parameters())


def check_shape(source: StoredModel, blueprint: Blueprint) -> None:
    """Refuse weights of another model than the run's. Fields on which no weight depends may differ."""
    if source.blueprint.spec.shape is not blueprint.spec.shape:
        raise Refusal(f"{source.weights.where} holds {source.blueprint.name}, this run trains {blueprint.name}")
    ours = asdict(blueprint.shape)
    free = {name: ours[name] for name in ("max_seq_len", *getattr(blueprint.shape, "of_training", ()))}
    theirs = asdict(replace(source.blueprint.shape, **free))
    if differing := [f"{k} {theirs[k]}, this run's {ours[k]}" for k in ours if ours[k] != theirs[k]]:
        raise Refusal(
            f"{source.weights.where} holds another model: its {'; its '.join(differing)}; set model.flavor and "
            f'model.vocab_size for it, or model.flavor = "config.json" and model.hf_assets_path to its folder; remove '
            "keys of [model] that say otherwise"
        )


def load_weights(source: StoredModel, model: ModelParts) -> None:
    """Fill this rank's part of a model of the same shape."""
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            source.weights.fill(source.blueprint.leading_name(name), parameter)


def write_hf(
    source: StoredModel, folder: str, assets: Path, dtype: torch.dtype | None, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a folder that transformers loads."""
    if source.blueprint.spec.hugging_face is None:
        raise Refusal(
            f"{source.family} does not say how Hugging Face names its weights; give its Family `hugging_face`"
        )
    tokenizer = build_tokenizer_for(source, assets)
    stored = dtype or next(iter(source.weights.outline.values())).dtype
    hugging_face = source.blueprint.spec.hugging_face()
    config = hugging_face.to_config(
        source.blueprint.shape, str(stored).removeprefix("torch."), tokenizer.bos_id, tokenizer.eos_id
    )
    with TemporaryDirectory() as copy:
        copy_tokenizer(source, assets, Path(copy))
        save_hf(source.weights, folder, hugging_face.to_name, config, copy, dtype, shard_bytes)


def copy_tokenizer(source: StoredModel, assets: Path, target: Path) -> None:
    """Copy the tokenizer's files, and the run's chat template. What was trained here begins a text as training did."""
    copy_assets(assets, target)
    if source.config is not None and source.config.model.chat_template is not None:
        shutil.copyfile(source.config.model.chat_template, target / "chat_template.jinja")
    if source.trained_here:
        follow_training(target)


def open_run(storage: Storage, manifest: Manifest) -> StoredModel:
    """The model of a run's checkpoint."""
    config = Whole.model_validate(
        {name: value for name, value in manifest.config.items() if name in Whole.model_fields or name not in OTHERS}
    )
    blueprint = find_model(config.model)
    weights, adapter = open_checkpoint(storage, manifest.step), None
    if config.lora.rank is not None:
        adapter = _open_adapter(weights, config, manifest.run["lora"])
        weights, config = merged(adapter), config.model_copy(update={"lora": Lora()})
    rows = _rows_of_embedding(blueprint, weights)  # the tokenizer may have fixed it
    blueprint = replace(blueprint, shape=replace(blueprint.shape, vocab_size=rows))
    weights.check(outline_of(blueprint))
    dtype = getattr(torch, config.training.mixed_precision_param)
    assets = Path(config.model.hf_assets_path)
    return StoredModel(weights, config.model.name, blueprint, assets, dtype, config, (storage, manifest), adapter)


def _open_adapter(weights: Weights, config: Config, said: Mapping[str, Any]) -> StoredAdapter:
    def find(path: str) -> tuple[Base, StoredModel]:
        base = find_base(path)
        return base, open_model(base.where, config.model.name)

    base = open_base(said, [config.checkpoint.initial_load_path or config.model.hf_assets_path], find)
    return StoredAdapter(weights, config.lora, base.weights, said["base"], said["norms"])


def _rows_of_embedding(blueprint: Blueprint, weights: Weights) -> int:
    lookup = next(part.name for part in blueprint.parts() if part.kind == "lookup")
    embedding = weights.outline.get(f"{lookup}.weight")
    return 1 if embedding is None else len(embedding)  # the check that follows finds a missing embedding


def _open_hf(folder: Path, family: str | None) -> StoredModel:
    family, blueprint = find_download(folder, find_families(family), family)
    assert blueprint.spec.hugging_face is not None
    to_name = blueprint.spec.hugging_face().to_name
    outline = outline_of(blueprint)
    weights = stacked(open_hf(folder), map(to_name, outline))
    if blueprint.tied:
        weights = _without_copy(weights, *map(to_name, blueprint.tied))
    weights.check({to_name(name): like for name, like in outline.items()})
    config = load_json(folder / "config.json")
    dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
    renamed = weights.renamed({name: to_name(name) for name in outline})
    return StoredModel(renamed, family, blueprint, folder, dtype)


def _without_copy(weights: Weights, first: str, second: str) -> Weights:
    """The weights without the second of two tied ones; some folders hold both, as Qwen3-0.6B's does."""
    if not {first, second} <= weights.outline.keys():
        return weights
    if not torch.equal(weights.read(first), weights.read(second)):
        raise Refusal(
            f"{weights.where} has tie_word_embeddings = true in config.json, but {second} differs from {first}; set "
            f"tie_word_embeddings = false there"
        )
    return weights.renamed({name: name for name in weights.outline if name != second})


def _open_other(folder: Path, family: str, open_folder: Callable[[Path], OtherFormat]) -> StoredModel:
    with refusing_harm(folder):
        found = open_folder(folder)

    def fill(name: str, tensor: Tensor) -> None:
        with refusing_harm(folder):
            whole = found.read(name)
        copy_part(tensor, lambda part: whole[part])

    blueprint = Blueprint(str(folder), find_family(family), found.shape)
    weights = Weights(str(folder), dict(found.outline), fill)
    weights.check(outline_of(blueprint))
    return StoredModel(weights, family, blueprint, folder, next(iter(found.outline.values())).dtype)


def write_checkpoint(source: StoredModel, folder: str, assets: Path, dtype: torch.dtype | None) -> None:
    """A run folder whose only checkpoint is the model, at step 0."""
    refuse_existing(folder)
    build_tokenizer_for(source, assets)
    own_assets = Path(folder) / "tokenizer"
    config = source.plain_config(folder, own_assets)
    copy_tokenizer(source, assets, own_assets)
    save_checkpoint(source.weights, Storage(f"{folder}/checkpoint"), config.model_dump(mode="json"), dtype)
