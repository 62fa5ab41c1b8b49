"""How far each layout's loss and gradient norm are from one process's: the table of docs/parallelism.md.

python -m tests.distributed.differences
"""

import tempfile

from tests.distributed import cases
from tests.distributed.conftest import Ranks
from tests.distributed.test_layouts import LAYOUTS, differences, of_one_process
from tests.tiny_runs import tiny_config, train_here


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        references: dict[str, list] = {}
        ranks = Ranks()
        print("| layout | loss | gradient norm |\n| --- | --- | --- |")
        for name, (world_size, overrides) in LAYOUTS.items():
            same = of_one_process(overrides)
            if str(same) not in references:
                references[str(same)] = train_here(tiny_config(f"{folder}/one-{len(references)}", **same))
            reference = references[str(same)]
            records = ranks(cases.train, world_size, f"{folder}/{name}", overrides)[0]
            loss, norm = (differences(records, reference, key) for key in ("loss", "grad_norm"))
            print(f"| {name} | {loss:.1e} | {norm:.1e} |", flush=True)
        ranks.stop()


if __name__ == "__main__":
    main()
