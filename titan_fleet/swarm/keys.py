"""The swarm's own authority, and one certificate for the syncer and for each site.

    python -m torchtitan swarm keys --syncer meet.example.org --sites zurich,lima
    python -m torchtitan swarm keys --sites oslo          # one more, later
    python -m torchtitan swarm keys --revoke lima         # the syncer refuses it from the next request on

Each folder goes to its machine over a channel that you trust. Whoever has keys/authority can admit sites, so keep it
off all of them.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from titan_fleet.swarm.join import require_packages
from torchtitan.refusal import Refusal

HELP = "make the authority and the certificates of a swarm, or revoke one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--syncer", default="", help="names or addresses of the syncer, separated by commas")
    parser.add_argument("--sites", default="", help="names of sites, separated by commas")
    parser.add_argument("--revoke", default="", help="name of a site whose certificate the syncer shall refuse")
    parser.add_argument("--out", default="keys", help="the folder for all of them (keys)")
    parser.add_argument("--days", type=int, default=365, help="how long the certificates are valid (365)")


def run(args: argparse.Namespace, _: Sequence[str]) -> None:
    require_packages()
    from titan_fleet.swarm.certificates import make, revoke

    folder, names = Path(args.out), [name for name in args.sites.split(",") if name]
    if args.revoke:
        print(revoke(folder, args.revoke))
        return
    if not names and not args.syncer:
        raise Refusal("swarm keys makes nothing yet; give --syncer and --sites, or --revoke a site")
    for line in make(folder, [name for name in args.syncer.split(",") if name], names, args.days):
        print(line)
