"""Measures devices and links of hosts that ssh reaches, from one terminal, and writes a cluster file.

python -m torchtitan probe hosts --hosts nodes.toml
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from titan_fleet.ssh.hosts import read_hosts
from titan_fleet.ssh.options import add_options
from titan_fleet.ssh.parts import Part
from titan_fleet.ssh.probe import collect, delete, probe_of
from titan_fleet.ssh.terminal import run_on_hosts
from titan_planner.probe.verb import add_what_it_writes, check_out
from torchtitan.refusal import Refusal

HELP = "measure devices and links of hosts that ssh reaches"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser)
    parser.add_argument("--image", help="a container image by which hosts are set up, as for `launch ssh`")
    add_what_it_writes(parser)


def run(args: argparse.Namespace, _: Sequence[str]) -> int:
    from titan_planner.probe.report import save

    if not args.hosts:
        raise Refusal("no --hosts is given; name a file with one host a line, or a nodes.toml")
    check_out(args.out)
    hosts = read_hosts(Path(args.hosts))
    job = probe_of(hosts, args.dtype)

    def take(parts: Sequence[Part]) -> None:
        save(args.out, collect(job.name, parts))
        delete(job.name, parts)
        print(f"{args.out}: links of {len(hosts)} nodes")

    return run_on_hosts(args, hosts, job, take)
