"""Prints what a preflight found as tables."""

import statistics
from collections.abc import Mapping
from typing import Any

from torchtitan.launch.addresses import interface_of
from torchtitan.launch.preflight.compare import name_of
from torchtitan.launch.preflight.facts import digest

SLOW = 0.5  # of the median speed of all pairs
_MOST_SHOWN = 16  # nodes; the other nodes appear only in notes and errors


def print_report(report: Mapping[str, Any]) -> None:
    nodes, pairs = report["nodes"], report["pairs"]
    rows = [["node", "host", "address", "clock", "cores", "code", "config", "devices"]]
    for rank, facts in enumerate(nodes[:_MOST_SHOWN]):
        clock = f"{facts['clock_seconds'] * 1e3:+.1f} ms" if "clock_seconds" in facts else ""
        interface = interface_of(facts["address"], facts["addresses"])
        known = [
            f"{device['name']} {device.get('tflops', 0):.0f} TFLOP/s" for device in facts["devices"] if "name" in device
        ]
        devices = ", ".join(f"{known.count(name)} x {name}" for name in dict.fromkeys(known)) or "CPU"
        which = [digest(facts["code"]), digest(facts["config"]), devices]
        rows.append([str(rank), facts["host"], f"{facts['address']} ({interface})", clock, str(facts["cores"]), *which])
    print(_table(rows))
    if len(nodes) > _MOST_SHOWN:
        print(f"and {len(nodes) - _MOST_SHOWN} more nodes (preflight.json)")
    if pairs and len(nodes) <= _MOST_SHOWN:
        trip = {(pair["to"], pair["from"]): pair["round_trip_ms"] for pair in pairs}
        print("\nGbit/s of one TCP stream, from a row's node to a column's; round trip in ms")
        print(
            _table(
                _square(speeds_of(report), len(nodes), ".2f"),
                _square(trip | {(b, a): v for (a, b), v in trip.items()}, len(nodes), ".3f"),
            )
        )
    elif pairs:
        speeds = [pair["gbit_there"] for pair in pairs]
        trips = [pair["round_trip_ms"] for pair in pairs]
        print(
            f"\n{report['rounds']}: {min(speeds):.2f} to {max(speeds):.2f} Gbit/s of one TCP stream (median "
            f"{statistics.median(speeds):.2f}), round trips of {min(trips):.3f} to {max(trips):.3f} ms"
        )
    for warning in report["warnings"]:
        print(f"note: {warning}")


def _square(values: Mapping[tuple[int, int], float], count: int, form: str) -> list[list[str]]:
    rows = [["", *map(str, range(count))]]
    return rows + [
        [str(a), *(format(values[a, b], form) if (a, b) in values else "-" for b in range(count))] for a in range(count)
    ]


def _table(*blocks: list[list[str]]) -> str:
    """Blocks of columns side by side, as text."""
    rows = [[cell for row in parts for cell in [*row, ""]] for parts in zip(*blocks, strict=True)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def speeds_of(report: Mapping[str, Any]) -> dict[tuple[int, int], float]:
    """Gbit/s by sender and receiver."""
    there = {(pair["from"], pair["to"]): pair["gbit_there"] for pair in report["pairs"]}
    return there | {(pair["to"], pair["from"]): pair["gbit_back"] for pair in report["pairs"]}


def slow_pairs(report: Mapping[str, Any]) -> list[str]:
    """Notes on pairs that are slower than half of the median."""
    speeds = speeds_of(report)
    if not speeds:
        return []
    median = statistics.median(speeds.values())
    slow = sorted((speed, pair) for pair, speed in speeds.items() if speed < SLOW * median)
    more = [f"and {len(slow) - 8} more slow pairs"] if len(slow) > 8 else []
    return [
        f"{name_of(report['nodes'], a)} to {name_of(report['nodes'], b)}: {speed:.2f} Gbit/s, less than half of the "
        f"median, {median:.2f}"
        for speed, (a, b) in slow[:8]
    ] + more
