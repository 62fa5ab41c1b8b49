"""`python -m torchtitan netem FILE -- COMMAND`: run COMMAND once for each site of a network, with its delays and rates.

The sites are network namespaces of this machine. With --interface, what this machine sends is slowed down instead.
"""

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from titan_planner.netem.namespaces import needs_programs, unshared
from titan_planner.netem.sites import Sites
from torchtitan.refusal import Refusal

HELP = "run a command at each site of an emulated network"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", type=Path, nargs="?", metavar="FILE", help="Emulate this network (TOML, as `plan place` reads it)"
    )
    parser.add_argument("--case", help="Choose a network by name or number, if the file has several")
    parser.add_argument(
        "--order", default="", help="List sites by NODE_RANK, as numbers or names, such as 3,1,0,2, or name a file"
    )
    parser.add_argument(
        "--rate_factor", type=float, default=1.0, help="Multiply every rate by this (default: %(default)s)"
    )
    parser.add_argument(
        "--measure", type=int, default=24, metavar="N", help="Measure at most N links first; 0 measures all"
    )
    parser.add_argument("--anyway", action="store_true", help="Continue even if a measured link is more than 10 %% off")
    parser.add_argument("--port", type=int, default=29500, help="Set MASTER_PORT (default: %(default)s)")
    parser.add_argument("--interface", help="Slow down what this interface sends, instead of sites")
    parser.add_argument("--gbit", type=float, help="Limit --interface to this many Gbit/s")
    parser.add_argument("--delay_ms", type=float, default=0.0, help="Delay --interface by this many ms (%(default)s)")
    parser.epilog = (
        "Give the command after --. The command gets NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, NGPU=1 and SITE."
    )


def run(args: argparse.Namespace, command: Sequence[str]) -> int:
    if not command:
        raise Refusal("no command is given; write it after --, such as -- ./run_llama_train.sh")
    if (args.file is None) == (args.interface is None):
        raise Refusal("give either a FILE with a network, or --interface with --gbit and --delay_ms")
    needs_programs("ip", "tc")
    if args.interface:
        from titan_planner.netem import interface

        return interface.run(args.interface, args.gbit, args.delay_ms, command)
    sites = _sites(args, command)
    words = unshared("--pid", "--fork", "--kill-child", "--mount-proc")
    process = subprocess.Popen(
        [*words, sys.executable, "-m", "titan_planner.netem.sites"],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    told = process.stdin

    def pass_on(number: int, _: object) -> None:
        told.write(f"{number}\n")
        told.flush()

    told.write(sites.to_json() + "\n")
    told.flush()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, pass_on)
    return process.wait()


def _sites(args: argparse.Namespace, command: Sequence[str]) -> Sites:
    from titan_planner.places.network import read_cases

    networks = read_cases(args.file)
    names = [name for name, _, _ in networks]
    chosen = [n for i, n in enumerate(networks, 1) if args.case in (None, n[0], str(n[2].get("number", i)))]
    if len(chosen) != 1:
        raise Refusal(f"--case {args.case} names {len(chosen)} networks of {args.file}; use one of: {'; '.join(names)}")
    network = chosen[0][1]
    regions = ["".join(c if c.isalnum() else "-" for c in region) for region in network.regions]
    count = len(regions)
    rates = (network.bandwidth[a, b] for a in range(count) for b in range(count) if a != b)
    if args.rate_factor <= 0 or min(rates, default=1) <= 0:
        raise Refusal("a rate is not above 0; give every link a rate, and a --rate_factor above 0")
    bits = network.bandwidth * 1e9 * args.rate_factor
    sites = [f"{region}-{regions[:i].count(region)}" for i, region in enumerate(regions)]
    return Sites(
        sites,
        network.delay.tolist(),
        bits.tolist(),
        _order(args.order, sites),
        args.measure,
        args.anyway,
        args.port,
        command,
    )


def _order(given: str, sites: Sequence[str]) -> list[int]:
    text = Path(given).read_text() if given and Path(given).is_file() else given
    words = text.replace("[", " ").replace("]", " ").replace(",", " ").split() or sites
    order = [sites.index(word) if word in sites else int(word) if word.isdecimal() else -1 for word in words]
    if sorted(order) != list(range(len(sites))):
        raise Refusal(
            f"--order {given} is not each of the {len(sites)} sites once; write 0,1,2 or {','.join(sites[:3])}"
        )
    return order
