"""Delay and bandwidth of every pair, measured inside the network, and the files that `plan` and `launch ssh` read.

The node with the smallest number asks the others. No result passes the serving machine.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from torchtitan.hardware import tflops_by_name
from torchtitan.launch.bounded import query_gpus
from torchtitan.launch.node import num_cores
from torchtitan.launch.preflight.connection import Channel, connect, listen, measure_with
from torchtitan.launch.preflight.leader import plan_rounds
from torchtitan.whole_file import write_whole

PORT = 29712  # inside the network
_SECONDS = 20.0  # for one pair
Found = dict[str, Any]


def listen_for_pairs(address: str, take: Callable[[Found, str], None]) -> socket.socket:
    """Answer other nodes in threads, until the socket is closed. `take` gets a result of all pairs and its sender."""
    listener = listen(PORT, address)
    allowed = threading.BoundedSemaphore(4)

    def answer(connection: socket.socket, slot: contextlib.ExitStack) -> None:
        channel = Channel(connection, _SECONDS)
        with slot, connection, contextlib.suppress(OSError, LookupError, TypeError, ValueError, RecursionError):
            connection.settimeout(_SECONDS)
            match (order := channel.receive())["do"]:
                case "facts":
                    channel.send(**facts())
                case "lead":
                    channel.send(found=_measure(str(order["address"])))
                case "pair":
                    channel.send(ready=True)
                    measure_with(connection, leads=False)
                case "result":
                    take(order, connection.getpeername()[0])

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                slot = contextlib.ExitStack()
                slot.enter_context(allowed)
                connection, _ = listener.accept()
                threading.Thread(target=answer, args=(connection, slot), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener


def _measure(address: str) -> tuple[float, float, float]:
    with connect(f"{address}:{PORT}", time.monotonic() + _SECONDS) as connection:
        connection.settimeout(_SECONDS)
        channel = Channel(connection, _SECONDS)
        channel.send(do="pair")
        channel.receive()
        return measure_with(connection, leads=True)


def _ask(to: str, **order: Any) -> Found:
    with connect(f"{to}:{PORT}", time.monotonic() + _SECONDS) as connection:
        channel = Channel(connection, 2 * _SECONDS)
        channel.send(**order)
        return channel.receive() if order["do"] != "result" else {}


def measure_all(nodes: Mapping[str, str]) -> Found:
    """Names to addresses: delay in ms and Gbit/s from each node to each, and what each node is."""
    names, addresses = list(nodes), list(nodes.values())
    delay = [[0.0] * len(names) for _ in names]
    gbit = [[0.0] * len(names) for _ in names]
    about = [_ask(address, do="facts") for address in addresses]
    for pairs in plan_rounds(len(names)):
        for one, other in pairs:  # one after the other: relayed pairs share the serving machine
            trip, there, back = _ask(addresses[one], do="lead", address=addresses[other])["found"]
            delay[one][other] = delay[other][one] = round(500 * trip, 3)
            gbit[one][other], gbit[other][one] = (float(f"{8e-9 * rate:.4g}") for rate in (there, back))
    result: Found = {"do": "result", "names": names, "delay_ms": delay, "gbit": gbit}
    result["facts"] = about
    for address in addresses:
        _ask(address, **result)
    return result


def facts() -> Found:
    """This node's devices, without torch: of a GPU the data sheet, of a CPU the speed of a product of matrices."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    rows = []
    with contextlib.suppress(OSError):
        smi = query_gpus("name,memory.total", 60)
        rows = [line.rsplit(", ", 1) for line in smi.stdout.splitlines()] if smi.returncode == 0 else []
    if rows:
        sizes = [int(size) / 1024 for _, size in rows if size.isdecimal()]  # a GPU may share the host's memory
        kind, gib = rows[0][0], min(sizes, default=host)
        return {"kind": kind, "gpus": len(rows), "memory_gib": gib, "tflops": tflops_by_name(kind)}
    import numpy as np

    side, seconds = 512, float("inf")
    a = np.ones((side, side), np.float32)
    for _ in range(5):
        begin = time.perf_counter()
        a @ a
        seconds = min(seconds, time.perf_counter() - begin)
    kind = f"CPU ({num_cores()} cores)"
    return {"kind": kind, "gpus": 0, "memory_gib": host, "tflops": float(f"{2e-12 * side**3 / seconds:.3g}")}


def write_files(folder: Path, result: Found, addresses: Mapping[str, str], ways: Sequence[str]) -> list[Path]:
    """cluster.toml for `plan --cluster`, nodes.toml for `launch ssh --hosts` and the console."""
    names = [str(name) for name in result["names"]]
    if unknown := set(names) - set(addresses):
        raise ValueError(f"{unknown} is not here")
    about = [dict(each) for each in result["facts"]]
    per_node = max(1, min(int(each["gpus"]) for each in about))
    case: Found = {"name": f"{len(names)} nodes of reach", "names": names, "regions": names, "per_node": per_node}
    for key in ("delay_ms", "gbit"):
        case[key] = [[float(value) for value in row] for row in result[key]]
    case["memory_gib"] = [round(float(each["memory_gib"]), 2) for each in about]
    if all(each["tflops"] for each in about):
        case |= {key: [each[key] for each in about] for key in ("kind", "tflops")}
    gpus = per_node if all(each["gpus"] for each in about) else 0
    sheets = ", and the data sheets of GPUs" if gpus else ""
    rests_on = f"reach's measurement of {time.strftime('%Y-%m-%d')}{sheets}"
    nodes = [{"name": name, "host": addresses[name], "address": addresses[name], "gpus": gpus} for name in names]
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "cluster.toml": "".join(f"# {way}\n" for way in ways) + tomli_w.dumps({"rests_on": rests_on, "case": [case]}),
        "nodes.toml": "# the order of NODE_RANK\n" + tomli_w.dumps({"node": nodes}),
    }
    for name, text in texts.items():
        write_whole(folder / name, text)
    return [folder / name for name in texts]
