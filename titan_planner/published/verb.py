"""`python -m torchtitan plan rows`: published runs, predicted beside measured."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from titan_planner.plan.cost import Rates
from titan_planner.published import megatron_memory
from titan_planner.published.fit import fit, fit_bytes
from titan_planner.published.rows import Row, name_of, read_rows, read_tables
from torchtitan.refusal import Refusal

_MOST_RATES = 9
_GIB = 2**30
HELP = "predict the runs of a file, and compare them with measurements"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE.toml")
    parser.add_argument("--fit", default="", metavar="ID,ID", help="Fit rates on these rows (default: none)")
    parser.add_argument("--rates", type=int, default=2, metavar="N", help="Fit at most N rates (default: %(default)s)")
    parser.add_argument("--leave_out", default="", metavar="ID,ID", help="Do not read these rows")
    parser.add_argument("--explain", action="store_true", help="Break down each step")


def run(args: argparse.Namespace, _: Sequence[str]) -> None:
    tables = read_tables(args.file)
    known = [name_of(row, number) for number, row in enumerate(tables["row"], 1)]
    named, left_out = (
        [part.strip() for part in each.split(",") if part.strip()] for each in (args.fit, args.leave_out)
    )
    for name in (*named, *left_out):
        if name not in known:
            raise Refusal(f"{args.file} has no row {name}; use some of {', '.join(known)}")
    rows = read_rows(args.file, left_out)
    for device in dict.fromkeys(row.device for row in rows):
        here = [row for row in rows if row.device == device]
        _show(here, [row for row in here if row.name in named], args)
    if formulas := _stated(tables, rows):
        print("what [[memory]] states, GiB")
        for name, size, said in formulas:
            print(f"{name:>70}  {size / _GIB:9.3f} {said / _GIB:9.3f}  {said / size - 1:+6.1%}")


def _show(rows: Sequence[Row], fitted_on: Sequence[Row], args: argparse.Namespace) -> None:
    rates, names = fit(fitted_on, min(args.rates, _MOST_RATES)) if fitted_on else (Rates(), ())
    device = rows[0].device
    print(f"{device.flops / 1e12:.0f} TFLOP/s, {device.memory_bandwidth / 1e9:.0f} GB/s of memory")
    for name in names:
        print(f"  {name} = {getattr(rates, name):.4g}, fitted (default {getattr(Rates(), name):.4g})")
    for said in dict.fromkeys(said for row in rows for said in row.assumed):
        print(f"  {said}, assumed: the file does not say it")
    print(f"{'row':>16}  {'measured':>9} {'predicted':>9}  error")
    for row in rows:
        note = "  fitted on" if row in fitted_on else ""
        print(
            f"{row.name:>16}  {row.seconds:9.3f} {float(row.predict(rates).total):9.3f}  {row.error(rates):+6.1%}{note}"
        )
        if args.explain:
            for part, seconds in row.predict(rates).parts.items():
                print(f"{'':>16}  {'':>9} {float(seconds):9.3f}  {part}")
    tested = [row for row in rows if row not in fitted_on]
    if tested:
        _errors(tested, rates)
    if weighed := [row for row in rows if row.memory_bytes]:
        _memory(weighed, [row for row in weighed if row in fitted_on], args)


def _errors(rows: Sequence[Row], rates: Rates) -> None:
    """Of rows that nothing was fitted on; and what they become with each constant 10 % off."""
    errors = [row.error(rates) for row in rows]
    print(f"{len(rows)} rows that nothing was fitted on: {_summary(errors)}")
    moved = {}
    for field in fields(Rates):
        for sign in (0.9, 1.1):
            other = replace(rates, **{field.name: getattr(rates, field.name) * sign})
            moved[f"{field.name} {sign - 1:+.0%}"] = [row.error(other) for row in rows]
    mean = _mean(errors)
    largest = sorted(moved.items(), key=lambda item: -abs(_mean(item[1]) - mean))[:6]
    print("mean error with a rate 10 % off: " + ", ".join(f"{n}: {_size(e):.1%} ({_mean(e):+.1%})" for n, e in largest))


def _memory(rows: Sequence[Row], fitted_on: Sequence[Row], args: argparse.Namespace) -> None:
    times = fit_bytes(fitted_on) if fitted_on else {}
    for name, factor in times.items():
        print(f"  {name}: {factor:.3g} times the default, fitted")
    print(f"{'GiB of row':>16}  {'measured':>9} {'predicted':>9}  error")
    errors = {}
    for row in rows:
        assert row.memory_bytes is not None
        held = row.bytes(**times)
        errors[row.name] = held / row.memory_bytes - 1
        note = "  fitted on" if row in fitted_on else ""
        print(f"{row.name:>16}  {row.memory_bytes / _GIB:9.2f} {held / _GIB:9.2f}  {errors[row.name]:+6.1%}{note}")
        if args.explain:
            for kind, size in row.held().items():
                print(f"{'':>16}  {'':>9} {float(size) / _GIB:9.2f}  {kind}, live")
    if tested := [errors[row.name] for row in rows if row not in fitted_on]:
        print(f"{len(tested)} rows' memory that nothing was fitted on: {_summary(tested)}")


def _summary(errors: Sequence[float]) -> str:
    return f"mean {_size(errors):.1%}, largest {max(map(abs, errors)):.1%}, signed mean {_mean(errors):+.1%}"


def _size(errors: Iterable[float]) -> float:
    return _mean([abs(error) for error in errors])


def _mean(errors: Sequence[float]) -> float:
    return sum(errors) / len(errors)


def _stated(tables: Mapping[str, Any], rows: Iterable[Row]) -> list[tuple[str, float, float]]:
    """What a file's [[memory]] states of its models, in bytes, and what the rows' own lists say of it."""
    found = []
    for table in tables.get("memory", []):
        for row in rows:
            if row.name.split()[0] != table.get("name"):
                continue
            work, layout = row.work, row.layout
            of_blocks = 18 * work.num_layers * work.layer.parameters / layout.pp
            waiting = float(megatron_memory.waiting_layers(work, layout, 0))
            kinds = {"parameters_and_optimizer_gib": of_blocks}
            if layout.sequence_split:
                kinds["activations_selective_and_sequence_parallel_gib"] = waiting * work.layer.kept["attention"]
            else:
                kinds["activations_no_recompute_gib"] = waiting * work.layer.kept["none"]
            found += [
                (f"{row.name}, {kind[:-4]}", table[kind] * 2**30, said) for kind, said in kinds.items() if kind in table
            ]
    return found
