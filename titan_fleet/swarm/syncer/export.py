"""Write the anchor of a swarm as a checkpoint, which converts, evaluates and generates as any run's does.

python -m torchtitan swarm export swarm --out outputs/anchor

It may run while the syncer serves. Of a swarm with several syncers, name the folders of all.

Weights that are not trained, and buffers, are in no anchor: for a model that has
some, use a site's checkpoint.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.refusal import Refusal

if TYPE_CHECKING:
    from titan_fleet.swarm.messages import Known, Weights

HELP = "write a swarm's anchor as a checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", metavar="folder", help="the --out of swarm serve, of each syncer")
    parser.add_argument("--out", required=True, help="the folder to write, as a run folder")


def run(args: argparse.Namespace, _: Sequence[str]) -> None:
    from titan_fleet.swarm.syncer.serve import CONFIG
    from torchtitan.config.load import load_config, with_seed

    out = Path(args.out)
    for folder in map(Path, args.folders):
        if not (folder / CONFIG).is_file():
            raise Refusal(
                f"{folder} is not the folder of a syncer, for it has no {CONFIG}; name the --out of swarm serve"
            )
    if out.exists():
        raise Refusal(f"{out} exists; remove it, or name another --out")
    folders, known = in_order([Path(folder) for folder in args.folders])
    config = load_config(["--job.config_file", str(folders[0] / CONFIG)], prog="swarm export")
    steps = [site.step for site in known.sites.values()]
    tokens = sum(site.tokens for site in known.sites.values())
    step = _write(folders, out, with_seed(config, known.seed), known.weights or [], max(1, *steps, 1), tokens)
    print(f"the anchor of {len(steps)} sites, as step {step}: {out}")


def in_order(folders: Sequence[Path]) -> tuple[list[Path], "Known"]:
    """The folders as the sites list their syncers, and what the first of them knows of the run."""
    from titan_fleet.swarm.syncer.syncer import read_known

    known = [read_known(folder) for folder in folders]
    places = [each.place for each in known if each.place is not None]
    if len(places) < len(known):
        waiting = next(folder for folder, each in zip(folders, known, strict=True) if each.place is None)
        raise Refusal(f"{waiting}: no site has joined yet; wait until one has")
    order = sorted(range(len(known)), key=places.__getitem__)
    first = known[order[0]]
    is_one_swarm = all(known[number].swarm == first.run for number in order[1:])
    if not is_one_swarm or sorted(places) != [(place, len(known)) for place in range(len(known))]:
        raise Refusal(
            f"{', '.join(map(str, folders))}: these are not the folders of all {places[order[0]][1]} syncers of one "
            "swarm; name the --out of each swarm serve once"
        )
    return [folders[number] for number in order], first


def _write(folders: Sequence[Path], out: Path, config: object, weights: "Weights", step: int, tokens: int) -> int:
    import torch

    from titan_fleet.swarm.fragments import Weight, divide
    from titan_fleet.swarm.outer import Outer
    from titan_fleet.swarm.syncer.state import FragmentState
    from torchtitan.checkpoint.manager import Checkpointer
    from torchtitan.checkpoint.storage import Storage
    from torchtitan.config.load import to_toml
    from torchtitan.config.schema import Config
    from torchtitan.parallel.collectives import start_process_group, stop_process_group

    assert isinstance(config, Config)
    section = config.swarm
    table = [Weight(name, tuple(shape)) for name, shape in weights]
    tensors = {f"model.{weight.name}": torch.empty(weight.rows, weight.columns) for weight in table}
    for number, boxes in enumerate(divide(table, section.fragments) if table else ()):
        folder = folders[number % len(folders)]
        state = FragmentState(folder / f"fragment-{number}", boxes, section.codec, Outer(section.outer_lr, 0.0))
        if state.version < 0:
            raise Refusal(f"{folder}: no site has brought first weights of fragment {number} yet; wait until one has")
        for box, anchor in zip(boxes, state.anchor, strict=True):
            tensors[f"model.{table[box.weight].name}"][box.row : box.end_row] = anchor
    if not tensors:
        raise Refusal(f"{folders[0]}: no site has joined yet; wait until one has")
    start_process_group(torch.device("cpu"), 0, 1, config.comm.init_timeout_seconds)
    try:
        out.mkdir(parents=True)
        (out / "config.toml").write_text(to_toml(config), encoding="utf-8")
        about = {"layout": "1 rank", "versions": {"torch": torch.__version__}, "config": config.model_dump(mode="json")}
        saved = config.checkpoint.model_copy(update={"async_mode": "disabled", "on_failure": "stop"})
        manager = Checkpointer(saved, Storage(str(out / "checkpoint")), about, config.comm.init_timeout_seconds)
        shaped = {f"model.{weight.name}": tensors[f"model.{weight.name}"].view(weight.shape) for weight in table}
        manager.save(step, shaped, {"tokens": tokens})
        manager.wait()
    finally:
        stop_process_group()
    return step
