"""Turns [model] into a Blueprint: finds the family and the shape, and checks the model under its layout. No torch."""

import functools
import importlib
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path

from torchtitan.config.load import ConfigError, load_config
from torchtitan.config.schema import Config, Model
from torchtitan.models.rules import find_refusals
from torchtitan.models.spec import Blueprint, Family, ModelSpec
from torchtitan.refusal import NotThereError, Refusal

# name -> where its Family is, imported when a run asks for it
FAMILIES = {
    "llama3": "torchtitan.models.llama.spec:LLAMA3",
    "llama2": "torchtitan.models.llama.spec:LLAMA2",
    "qwen3": "torchtitan.models.qwen3.spec:QWEN3",
    "qwen3_moe": "torchtitan.models.qwen3_moe.spec:QWEN3_MOE",
    "mixtral": "torchtitan.models.mixtral.spec:MIXTRAL",
}
FROM_DOWNLOAD = "config.json"  # as model.flavor: the shape that this file in model.hf_assets_path describes


def load_run(
    argv: Sequence[str], world_size: int | None, prog: str = "train.py", rank: int = 0
) -> tuple[Config, Blueprint]:
    """The configuration that a command line asks for, and its model; raises ConfigError with all mistakes."""
    config = load_config(argv, world_size, prog, rank)
    return config, plan_model(config, config.job.config_file or "command line")


def load_run_or_exit(
    argv: Sequence[str], world_size: int | None, rank: int, prog: str = "train.py"
) -> tuple[Config, Blueprint]:
    """Like load_run, for a program: on mistakes, rank 0 prints them and every rank exits with code 2."""
    try:
        return load_run(argv, world_size, prog, rank)
    except (ConfigError, SystemExit) as error:  # tyro has printed what it ends with, as --help has
        time.sleep(2 if rank else 0)  # as soon as one rank has failed, torchrun ends all; so rank 0 prints first
        if rank == 0 and isinstance(error, ConfigError):
            print(error, file=sys.stderr)
        raise SystemExit(getattr(error, "code", 2)) from None


def other_program(config: Config) -> str | None:
    """The verb that this recipe has where torchtitan has a key."""
    if config.comm.mode == "fake_backend":
        return "dry_run"
    return "seed_checkpoint" if config.checkpoint.create_seed_checkpoint else None


def refuse_other_programs(config: Config, argv: Sequence[str]) -> None:
    """train.py only trains; ./run_llama_train.sh starts the verb instead."""
    if verb := other_program(config):
        key = "comm.mode = fake_backend" if verb == "dry_run" else "checkpoint.create_seed_checkpoint = true"
        command = shlex.join(["python", "-m", "torchtitan", verb, "--", *argv])
        raise Refusal(f"{key} trains nothing; start ./run_llama_train.sh with these options, or: {command}")


def plan_model(config: Config, origin: str = "the configuration") -> Blueprint:
    """The model that a valid configuration names. Raises ConfigError if the model cannot run under it."""
    try:
        blueprint = find_model(config.model)
    except NotThereError as error:
        beside = f", nor beside {config.job.config_file}" if config.job.config_file else ""
        raise ConfigError(origin, [f"{error.what}{beside}; {error.fix}"]) from None
    except Refusal as error:
        raise ConfigError(origin, [str(error)]) from None
    if refusals := list(find_refusals(blueprint, config)):
        raise ConfigError(origin, refusals)
    return blueprint


def find_model(model: Model) -> Blueprint:
    """The flavor's shape, with the keys of [model] over it."""
    spec = find_spec(model.name)
    if isinstance(spec, ModelSpec):
        from torchtitan.models.own import find_own_model

        return find_own_model(model.name, spec)
    known = {field.name: field for field in fields(spec.shape) if field.init}
    said = {key: getattr(model, key) for key in SHAPE_KEYS if getattr(model, key) is not None}
    if unknown := [key for key in said if key not in known]:
        raise Refusal(
            f"model.{unknown[0]} = {said[unknown[0]]}: {model.name} has no {unknown[0]}; remove it, or use one of "
            f"{', '.join(known)}"
        )
    needed = [name for name, field in known.items() if field.default is field.default_factory is MISSING]
    if model.flavor == FROM_DOWNLOAD:
        from torchtitan.models.downloads import find_download

        shape = replace(find_download(Path(model.hf_assets_path), {model.name: spec}, model.name)[1].shape, **said)
    elif needed and all(name in said for name in needed):
        return Blueprint(f"{model.name} with the shape in [model]", spec, spec.shape(**said))
    elif model.flavor in spec.flavors:
        shape = replace(spec.flavors[model.flavor], **said)
    else:
        raise Refusal(
            f'model.flavor = "{model.flavor}" is no flavor of {model.name}; use one of {", ".join(spec.flavors)}, or '
            f'"{FROM_DOWNLOAD}" for the model in model.hf_assets_path, or say all of {", ".join(needed)} under [model]'
        )
    changed = "".join(f", {key} {value}" for key, value in said.items() if key != "vocab_size")
    return Blueprint(f"{model.name} {model.flavor}{changed}", spec, shape)


SHAPE_KEYS = (
    *("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size", "norm_eps", "rope_theta"),
    *("rope_scaling", "tied_embeddings", "max_seq_len", "num_experts", "experts_per_token", "balance", "balance_rate"),
)


def find_families(family: str | None = None) -> dict[str, Family]:
    return {name: find_family(name) for name in ([family] if family else FAMILIES)}


def find_family(name: str) -> Family:
    spec = find_spec(name)
    if isinstance(spec, ModelSpec):
        raise Refusal(f"{name} is a model of your own, and this needs a family that reads text (docs/recipe/models.md)")
    return spec


@functools.cache
def find_spec(name: str) -> Family | ModelSpec:
    """The family that `model.name` stands for: a name of the table, `package.module:SPEC` or `path/to/file.py:SPEC`."""
    place, _, attribute = FAMILIES.get(name, name).rpartition(":")
    if not place:
        raise Refusal(
            f'model.name = "{name}" is no family of this recipe; use one of {", ".join(FAMILIES)}, or name your own as '
            f'"package.module:SPEC" or "path/to/file.py:SPEC"'
        )
    if name in FAMILIES:
        family: Family = getattr(importlib.import_module(place), attribute)
        return family
    from torchtitan.models.own_file import load

    spec = getattr(load(place, name), attribute, None)
    if not isinstance(spec, Family | ModelSpec):
        raise Refusal(
            f'model.name = "{name}": {place} has no ModelSpec called {attribute}; define {attribute} = ModelSpec(...) '
            f"or Family(...) there (torchtitan/models/spec.py)"
        )
    return spec
