"""Starts this node's ranks of a probe, which measures devices and links and writes a cluster file.

PROBE=1 ./run_llama_train.sh                    on each node, with the variables of a training run
python -m torchtitan probe                      the same
python -m torchtitan probe --hosts nodes.toml   on all these nodes, from one terminal
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titan_fleet.ssh.options import add_options
from torchtitan.launch.start import NodeStart, become, plan_program
from torchtitan.refusal import Refusal

if TYPE_CHECKING:
    from titan_fleet.ssh.parts import Part

HELP = "measure devices and links, and write a cluster file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("clusters/here.toml"),
        help="Write the cluster file here (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="Give the mixed_precision_param of the runs to plan (default: the one that multiplies faster here)",
    )
    add_options(parser)
    parser.add_argument("--image", help="a container image by which hosts are set up, as for `launch ssh`")
    parser.epilog = "NGPU says how many processes to start, as for ./run_llama_train.sh: one a GPU, or one on a CPU."


def run(args: argparse.Namespace, options: Sequence[str]) -> int:
    if args.hosts:
        return on_hosts(args)
    become(lambda gpus: plan(args, gpus))
    return 0  # PRINT_ONLY


def on_hosts(args: argparse.Namespace) -> int:
    """The probe on the nodes of a file, all from this terminal."""
    from titan_fleet.ssh.hosts import read_hosts
    from titan_fleet.ssh.probe import collect, delete, probe_of
    from titan_fleet.ssh.terminal import run_on_hosts
    from titan_planner.probe.report import save

    check_out(args.out)
    hosts = read_hosts(Path(args.hosts))
    job = probe_of(hosts, args.dtype)

    def take(parts: "Sequence[Part]") -> None:
        save(args.out, collect(job.name, parts))
        delete(job.name, parts)
        print(f"{args.out}: links of {len(hosts)} nodes")

    return run_on_hosts(args, hosts, job, take)


def check_out(out: Path) -> None:
    if out.is_dir() or out.suffix != ".toml":
        raise Refusal(f"--out {out} is no name of a TOML file; use a name such as clusters/here.toml")


def plan(args: argparse.Namespace, gpus: int) -> NodeStart:
    check_out(args.out)
    program = ["-m", "titan_planner.probe.rank", str(args.out), *[args.dtype] * (args.dtype is not None)]
    start = plan_program(os.environ, f"measuring for {args.out}", program, gpus)
    above = next(folder for folder in args.out.absolute().parents if folder.exists())
    if start.node is not None and not start.node.rank and not os.access(above, os.W_OK):
        raise Refusal(f"--out {args.out}: {above} cannot be written; use a folder of your own")
    return start
