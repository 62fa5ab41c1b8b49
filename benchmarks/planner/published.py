"""How far the planner is off published runs, when its rates are fitted on some of their rows and predict the others.

python -m benchmarks.planner.published

Prints the tables of docs/planner/figures.md. The tests of the planner bound these figures.
"""

import itertools
import random
import statistics
from collections.abc import Iterable, Sequence

from titan_planner.plan.cost import Rates
from titan_planner.published.fit import fit, fit_bytes
from titan_planner.published.rows import Row, read_rows
from torchtitan.root import ROOT

PLANNING = ROOT / "tests/assets/planning"
DRAWS = 40  # of nine rows
MOST_PAIRS, DRAWN_PAIRS = 300, 66
WITH_A_DEFECT = {"34", "35", "40", "41"}  # rows of torchtitan's table that its authors explain by a bug of that time


def errors(rows: Iterable[Row], rates: Rates) -> list[float]:
    return [100 * abs(row.error(rates)) for row in rows]


def after_fits(rows: Sequence[Row], choices: Iterable[Sequence[Row]], most: int) -> str:
    """The medians, over the choices of rows to fit on, of the mean and of the largest error of the other rows."""
    means, largest = [], []
    for known in choices:
        found = errors((row for row in rows if row not in known), fit(known, most)[0])
        means.append(statistics.mean(found))
        largest.append(max(found))
    return f"mean {statistics.median(means):.1f} %, largest {statistics.median(largest):.1f} %, {len(means)} fits"


def pairs_of(rows: Sequence[Row]) -> list[tuple[Row, ...]]:
    """All pairs; for many rows a fixed draw of them."""
    pairs = list(itertools.combinations(rows, 2))
    return pairs if len(pairs) <= MOST_PAIRS else random.Random(0).sample(pairs, DRAWN_PAIRS)


def orders_kept(rows: Sequence[Row], choices: Iterable[Sequence[Row]], most: int) -> str:
    """How often the planner names the faster of two runs that differ in little."""
    pairs = [(a, b) for a, b in itertools.combinations(rows, 2) if a.group == b.group]
    right = total = 0
    for known in choices:
        rates, _ = fit(known, most)
        seconds = {row.name: float(row.predict(rates).total) for row in rows}
        right += sum((a.seconds < b.seconds) == (seconds[a.name] < seconds[b.name]) for a, b in pairs)
        total += len(pairs)
    return f"the faster of {len(pairs)} pairs is named in {100 * right / total:.1f} %"


def memory(rows: Sequence[Row]) -> str:
    def off(**by: float) -> list[float]:
        return [100 * (row.bytes(**by) / row.memory_bytes - 1) for row in rows if row.memory_bytes]

    def mean_size(found: Iterable[float]) -> float:
        return statistics.mean(abs(each) for each in found)

    fitted = [mean_size(off(**fit_bytes(known))) for known in itertools.combinations(rows, 2)]
    return (
        f"{len(rows)} rows without a fit: mean {mean_size(off()):.1f} %, largest {max(map(abs, off())):.1f} %, "
        f"signed {statistics.mean(off()):+.1f} %; after two rows {statistics.median(fitted):.1f} %"
    )


def main() -> None:
    selene = read_rows(PLANNING / "megatron_selene.toml")
    print(f"Megatron-LM on Selene, from both 22B rows: {after_fits(selene, [selene[:2]], 2)}", flush=True)
    titan = {int(row.name): row for row in read_rows(PLANNING / "torchtitan_tables.toml")}
    a100 = [titan[number] for number in range(1, 9)]
    h100 = [titan[number] for number in range(9, 42) if str(number) not in WITH_A_DEFECT]
    draw = random.Random(0)
    nine = [draw.sample(h100, 9) for _ in range(DRAWS)]
    print(f"torchtitan on H100, from 9 of {len(h100)} rows: {after_fits(h100, nine, 7)}")
    print(f"  {orders_kept(h100, nine, 7)}")
    print(f"torchtitan on A100, from 2 of 8 rows: {after_fits(a100, pairs_of(a100), 2)}")
    print(f"  without a fit {statistics.mean(errors(a100, Rates())):.1f} %", flush=True)
    for file in ("nemo_h100", "mpt_a100_80gb", "mpt_a100_40gb", "mpt_h100", "simumax_b200"):
        rows = read_rows(PLANNING / f"{file}.toml")
        print(f"{file}, from 2 of {len(rows)} rows: {after_fits(rows, pairs_of(rows), 2)}")
        print(f"  without a fit {statistics.mean(errors(rows, Rates())):.1f} %", flush=True)
    some = [row for number, row in titan.items() if number < 42 and row.memory_bytes]
    print(f"memory of torchtitan on H100: {memory(some)}")
    print(f"  without tp and pp: {memory([row for row in some if row.layout.tp == row.layout.pp == 1])}")
    print(f"memory on B200: {memory(read_rows(PLANNING / 'simumax_b200.toml'))}")


if __name__ == "__main__":
    main()
