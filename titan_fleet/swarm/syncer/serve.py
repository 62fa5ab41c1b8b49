"""Serve a swarm: the machine that all sites call, where what they learned is merged. It needs no GPU.

    python -m torchtitan swarm serve train.toml --keys keys/syncer --out swarm

The file is the sites' own. What the syncer holds lies in --out, and the same command goes on from there.
"""

import argparse
import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path

from titan_fleet.packages import require_packages
from titan_fleet.section import swarm_of

CONFIG = "config.toml"
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # of glibc
HELP = "merge what the sites of a swarm learned; they call this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="the TOML file of the run; further options after --")
    parser.add_argument("--keys", default="keys/syncer", help="the syncer's folder of swarm keys (%(default)s)")
    parser.add_argument("--out", default="swarm", help="the folder of anchors and merges (%(default)s)")
    parser.add_argument("--host", default="0.0.0.0", help="the address to listen at (%(default)s: all)")
    parser.add_argument("--port", type=int, default=29700, help="the port to listen at (%(default)s)")
    parser.epilog = "Options of the run may follow --, as --swarm.quorum 3."


def run(args: argparse.Namespace, options: Sequence[str]) -> None:
    require_packages()
    import resource

    from titan_fleet.swarm.certificates import sites_of
    from titan_fleet.swarm.decide import goes_far
    from titan_fleet.swarm.identity import shared
    from titan_fleet.swarm.syncer.door import MOST_DESCRIPTORS
    from titan_fleet.swarm.syncer.server import Server
    from titan_fleet.swarm.syncer.syncer import Syncer
    from torchtitan.config.load import load_config, to_toml
    from torchtitan.observe.log import logger, start_logging
    from torchtitan.observe.run_folder import claim

    config = load_config(["--job.config_file", args.config, *options], prog="swarm serve")
    start_logging()
    if sys.platform == "linux":  # freed memory goes back to the system, or to the next request of any thread
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 8 << 20), libc.mallopt(M_ARENA_MAX, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    keys, out = Path(args.keys), Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    lock = claim(out, "--out")  # `runs` and the console see by it that somebody serves
    section = swarm_of(config)
    syncer = Syncer(out, section, shared(config), config.debug.seed, lambda: sites_of(keys))
    (out / CONFIG).write_text(to_toml(config), encoding="utf-8")  # for swarm export
    if section.every_seconds is None:
        meetings = config.training.steps // section.every
        far = goes_far(section.method, section.outer_lr, section.outer_momentum, meetings)
        if far.yes:
            logger.warning(far.why)
    logger.info(f"swarm {syncer.run} at port {args.port}: up to {section.sites} sites, in {args.out}")
    with lock:
        Server(syncer, keys).build(args.host, args.port).run()
