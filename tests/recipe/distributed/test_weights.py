"""Stored weights on any layout: each rank gets the part one process would have there, text and loss are the same."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import Ranks
from tests.recipe.distributed.cases import piece_of
from tests.recipe.distributed.test_layouts import layout
from tests.stored_models import SHAPES, random_weights, store_run
from tests.tiny_runs import TINY, tiny_config
from torchtitan.__main__ import main
from torchtitan.hardware import Place
from torchtitan.parallel import collectives
from torchtitan.tools.text import writer
from torchtitan.tools.text.perplexity import evaluate, resolve
from torchtitan.training.assemble import start_run
from torchtitan.training.model import give_memory
from torchtitan.weights.stored import load_weights, open_model

VALIDATION = {"validation__dataset_path": "tests/assets/pydocs/validation.jsonl", "validation__seq_len": 64,
              "validation__steps": 3}  # fmt: skip
PROMPTS = [[0, 5, 900, 31], [0, 77], [0, *range(100, 140)]]


def loaded(rank: int, world_size: int, source: str, flavor: str, keys: dict[str, Any]) -> list[Any]:
    """This rank's parameters, filled: name, where its part begins, and the part."""
    config = tiny_config("unused", world_size, model__flavor=flavor, **keys)
    store = open_model(source)
    run = start_run(config, store.blueprint, Place(rank, rank, world_size))
    model = run.lay_out_model()
    give_memory(model, config, run.device)
    load_weights(store, model)
    pieces: list[tuple[str, tuple[int, ...], Tensor]] = []
    for name, parameter in model.named_parameters():
        pieces.append((name, *piece_of(parameter)))
    return pieces


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """A flavor's weights as a run has them, and as Hugging Face has."""

    @functools.cache
    def store(flavor: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(flavor)
        run, hf = store_run(folder / "run", flavor), folder / "hf"
        main(["convert", str(run), str(hf), "--shard_gb", "0.0003"])
        return run, hf

    return store


LAYOUTS = {
    "FSDP 2": (2, layout(4)),
    "TP 2": (2, layout(tp=2)),
    "FSDP 2 x TP 2": (4, layout(4, tp=2)),
    "PP 2": (2, layout(pp=2)),
    "PP 2 in a V": (2, layout(pp=2, schedule="ZBVZeroBubble")),
    "HSDP 2 x 2": (4, layout(2, replicate=2)),
}


CASES = [*((name, "tiny") for name in LAYOUTS), *((name, "tiny-tied") for name in ("TP 2", "PP 2", "PP 2 in a V"))]


@pytest.mark.parametrize("origin", ["checkpoint", "Hugging Face"])
@pytest.mark.parametrize(("name", "flavor"), CASES)
def test_each_rank_gets_its_part(
    flavor: str, name: str, origin: str, ranks: Ranks, stored: Callable[[str], tuple[Path, Path]]
) -> None:
    run, hf = stored(flavor)
    world_size, keys = LAYOUTS[name]
    keys = {key: value for key, value in keys.items() if key != "model__flavor"}
    source = run if origin == "checkpoint" else hf
    answers = ranks(loaded, world_size, str(source), flavor, keys)
    whole = random_weights(SHAPES[flavor])
    if flavor == "tiny-tied":
        whole["output.weight"] = whole["tok_embeddings.weight"]  # a pipeline's last stage has a copy
    covered = dict.fromkeys(whole, 0)
    for pieces in answers:
        for parameter, begin, piece in pieces:
            at = tuple(slice(b, b + size) for b, size in zip(begin, piece.shape, strict=True))
            assert torch.equal(whole[parameter][at], piece), parameter
            covered[parameter] += piece.numel()
    # Norms are whole on all TP ranks, everything is on all replicas, and a tied output is a parameter only on a stage.
    copies = {"HSDP 2 x 2": 2}.get(name, 1)
    absent = set() if "PP" in name or flavor == "tiny" else {"output.weight"}
    for parameter, count in covered.items():
        replicated = 2 if "TP" in name and whole[parameter].ndim == 1 else copies
        assert count == (0 if parameter in absent else replicated * whole[parameter].numel()), parameter


def generated(rank: int, world_size: int, source: str) -> list[list[int | None]]:
    axis, device = None, torch.device("cpu")
    if world_size > 1:
        collectives.start_process_group(device, rank, world_size, 60)
        axis = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    model = writer.build_model(open_model(source, "tests.tiny_models:LLAMA"), torch.float32, device, axis)
    sampling = writer.Sampling(temperature=0.7, top_k=200, top_p=0.95, seed=3)
    greedy = list(writer.generate(model, 1000, PROMPTS, {1}, 12, writer.Sampling()))
    return greedy + list(writer.generate(model, 1000, PROMPTS, {1}, 12, sampling))


@pytest.mark.parametrize("flavor", ["tiny-tied", "tiny-scaled"])
def test_split_tensors_write_the_same_text(
    flavor: str, ranks: Ranks, stored: Callable[[str], tuple[Path, Path]]
) -> None:
    _, hf = stored(flavor)
    degree = 4 if flavor == "tiny-scaled" else 2
    assert ranks(generated, degree, str(hf)) == [generated(0, 1, str(hf))] * degree


def evaluated(rank: int, world_size: int, source: str, options: list[str]) -> tuple[float, int]:
    place = Place(rank, rank, world_size)
    store = open_model(source)
    return evaluate(store, *resolve(store, options, place), place)


def test_eval_on_any_layout_measures_the_same(ranks: Ranks, tmp_path: Path) -> None:
    run = store_run(tmp_path / "run", weights=random_weights(TINY), parallelism__tensor_parallel_degree=1, **VALIDATION)
    (alone,) = ranks(evaluated, 1, str(run), [])
    for world_size, options in [
        (2, []),
        (2, ["--parallelism.tensor_parallel_degree", "2"]),
        (4, ["--parallelism.context_parallel_degree", "2"]),
        (2, ["--parallelism.pipeline_parallel_degree", "2"]),
    ]:
        for loss, tokens in ranks(evaluated, world_size, str(run), options):
            assert loss == pytest.approx(alone[0], rel=1e-5) and tokens == alone[1] == 3 * 8 * 64
