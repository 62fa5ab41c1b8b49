"""How far each layout's loss, gradient norm and parameters are from one process's: the table of docs/parallelism.md.

python -m tests.distributed.differences
"""

import tempfile

from tests.distributed import cases
from tests.distributed.conftest import Ranks
from tests.distributed.test_layouts import LAYOUTS, Trained, differences, of_one_process, parameter_difference


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        alone: dict[str, Trained] = {}
        ranks = Ranks()
        print("| layout | loss | gradient norm | parameters |\n| --- | --- | --- | --- |")
        for name, (world_size, overrides) in LAYOUTS.items():
            same = of_one_process(overrides)
            if str(same) not in alone:
                alone[str(same)] = cases.train_and_keep(0, 1, f"{folder}/one-{len(alone)}", same)
            reference, parameters = alone[str(same)]
            answers = ranks(cases.train_and_keep, world_size, f"{folder}/{name}", overrides)
            loss, norm = (differences(answers[0][0], reference, key) for key in ("loss", "grad_norm"))
            apart = parameter_difference([pieces for _, pieces in answers], parameters)
            print(f"| {name} | {loss:.1e} | {norm:.1e} | {apart:.1e} |", flush=True)
        ranks.stop()


if __name__ == "__main__":
    main()
