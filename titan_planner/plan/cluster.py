"""The machines that a plan is for: a TOML file of nodes, data sheets and links (docs/planner/planner.md)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import tomli

from titan_planner.plan.cost import Device, Machine, Rates
from torchtitan.refusal import Refusal

# Keys of each table: name -> whether it must be there.
_TABLES = {
    "device": {"name": True, "tflops": True, "memory_gib": True, "memory_gbytes_per_second": True},
    "nodes": {"count": True, "devices": True},
    "links": {"inside_gbytes_per_second": True, "between_gbit_per_device": True},
    "rates": {field.name: False for field in fields(Rates)},
}


@dataclass(frozen=True)
class Cluster:
    """Like nodes of like devices."""

    name: str
    device_name: str
    num_devices: int
    memory_bytes: float  # that a process may use of a device
    machine: Machine
    rests_on: str  # where the numbers come from


def read_toml(path: Path, option: str = "") -> dict[str, Any]:
    try:
        return tomli.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refusal(f"{option}{path} cannot be read as TOML: {error}") from None


@contextmanager
def describes(path: Path, what: str) -> Iterator[None]:
    """Refuse a file in which a value is of another kind than it should be."""
    try:
        yield
    except Refusal:
        raise
    except KeyError as error:
        raise Refusal(f"{path} has no {error}; docs/planner/unlike.md describes the format") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        wrong = f"{type(error).__name__}: {error}"
        raise Refusal(f"{path} describes no {what} ({wrong}); docs/planner/unlike.md describes the format") from None


def read_cluster(path: Path) -> Cluster:
    tables = read_toml(path, "--cluster ")
    values = {name: _table(path, tables, name, keys) for name, keys in _TABLES.items()}
    if unknown := set(tables) - set(_TABLES) - {"name", "rests_on", "probe", "case"}:
        raise Refusal(f"--cluster {path} has an unknown {sorted(unknown)[0]}; use {', '.join(_TABLES)}")
    with describes(path, "cluster"):
        device, nodes, links, rates = values["device"], values["nodes"], values["links"], values["rates"]
        sheet = Device(
            flops=device["tflops"] * 1e12,
            memory_bandwidth=device["memory_gbytes_per_second"] * 1e9,
            inside=links["inside_gbytes_per_second"] * 1e9,
            between=links["between_gbit_per_device"] / 8 * 1e9,
            per_node=nodes["devices"],
        )
        return Cluster(
            name=str(tables.get("name", path.stem)),
            device_name=str(device["name"]),
            num_devices=nodes["count"] * nodes["devices"],
            memory_bytes=device["memory_gib"] * 2**30,
            machine=Machine(sheet, Rates(**rates)),
            rests_on=str(tables.get("rests_on", "the data sheet"))
            + (f", with {len(rates)} rates of its own" * bool(rates)),
        )


def _table(path: Path, tables: Mapping[str, Any], name: str, keys: Mapping[str, bool]) -> dict[str, Any]:
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise Refusal(
            f"--cluster {path}: {name} is no table; the planner lays out runs on like nodes, so use one [{name}]"
        )
    where = f"--cluster {path}: [{name}]"
    for key in table:
        if key not in keys:
            raise Refusal(f"{where} has an unknown {key}; use {', '.join(keys)}")
    for key, is_needed in keys.items():
        if is_needed and key not in table:
            raise Refusal(f"{where} lacks {key}; docs/planner/planner.md has an example")
        if key == "name" or key not in table:
            continue
        value, whole, may_be_0 = table[key], name == "nodes", name == "rates"
        is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not is_number or not (value > 0 or may_be_0 and value == 0):
            raise Refusal(f"{where} {key} = {value!r}; use a positive {'whole ' * whole}number")
    return table
