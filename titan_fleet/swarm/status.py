"""Who takes part in a swarm, how far each site is, and when it was last merged.

python -m torchtitan swarm status https://meet.example.org:29700 --keys keys/zurich
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from titan_fleet.swarm.join import require_packages
from torchtitan.refusal import Refusal

HELP = "list the sites of a swarm, their tokens, speed and last meeting"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", help="address of the syncer")
    parser.add_argument("--keys", required=True, help="the folder of a site's keys")


def run(args: argparse.Namespace, _: Sequence[str]) -> None:
    require_packages()
    import httpx

    from titan_fleet.swarm.certificates import context

    try:
        answer = httpx.get(f"{args.url}/status", verify=context(Path(args.keys), is_server=False), timeout=10).json()
    except (httpx.HTTPError, ValueError) as error:
        raise Refusal(
            f"{args.url} gives no status: {error}; is it the syncer's address, and are the keys its?"
        ) from None
    if "refusal" in answer:
        raise Refusal(answer["refusal"])
    meetings = ", ".join(f"{version} of fragment {number}" for number, version in answer["versions"].items())
    print(f"swarm {answer['run']}, meetings: {meetings}")
    print(f"{'site':16} {'there':6} {'step':>8} {'tokens':>14} {'tokens/s':>10}  last meeting")
    for name, site in sorted(answer["sites"].items()):
        there = "yes" if site["present"] else "no"
        numbers = f"{site['step']:>8,} {site['tokens']:>14,} {site['speed']:>10,.0f}"
        print(f"{name:16} {there:6} {numbers}  {site['meeting'] or 'none yet'}")
