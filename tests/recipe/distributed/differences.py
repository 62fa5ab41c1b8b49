"""How far each layout's loss, gradient norm and parameters are from one process's: docs/recipe/figures.md.

python -m tests.recipe.distributed.differences
python -m tests.recipe.distributed.differences compiled
"""

import argparse
import tempfile

from tests.ranks import Ranks
from tests.recipe.distributed import cases
from tests.recipe.distributed.test_layouts import (
    LAYOUTS,
    OPTIONS,
    Trained,
    differences,
    of_one_process,
    parameter_difference,
    with_option,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("option", nargs="?", choices=OPTIONS, help="what the runs have besides the layout")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        alone: dict[str, Trained] = {}
        ranks = Ranks()
        print("| layout | loss | gradient norm | parameters |\n| --- | --- | --- | --- |")
        for name, (world_size, overrides) in LAYOUTS.items():
            overrides = overrides | {"training__steps": args.steps}
            overrides = with_option(overrides, args.option) if args.option else overrides
            same = of_one_process(overrides)
            if str(same) not in alone:
                alone[str(same)] = cases.train_and_keep(0, 1, f"{folder}/one-{len(alone)}", same)
            reference, parameters = alone[str(same)]
            try:
                answers = ranks(cases.train_and_keep, world_size, f"{folder}/{name}", overrides)
            except AssertionError as error:
                print(f"| {name} | {str(error).strip().splitlines()[-1]} | | |", flush=True)
                continue
            loss, norm = (differences(answers[0][0], reference, key) for key in ("loss", "grad_norm"))
            apart = parameter_difference([pieces for _, pieces in answers], parameters)
            print(f"| {name} | {loss:.1e} | {norm:.1e} | {apart:.1e} |", flush=True)
        ranks.stop()


if __name__ == "__main__":
    main()
