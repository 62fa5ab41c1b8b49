"""Form the sites of a swarm out of unlike providers, cut the model to each one's memory, and write what each starts.

    python -m torchtitan swarm plan nodes.json --config train.toml --syncer https://meet.example.org:29700 --out plan

The file is Ravnest's node_configs.json: address, `ram` in GB and `bandwidth` in Mbit/s of each provider.
"""

import argparse
import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.models.families import load_run_or_exit
from torchtitan.refusal import Refusal

if TYPE_CHECKING:
    from titan_planner.sites.clusters import Site

HELP = "form sites out of unlike providers, and write what each starts"
_SCRIPT = """#!/usr/bin/env bash
# Starts one provider's part of its site, in the recipe's folder: {folder}/start.sh PROVIDER [options of train.py]
set -euo pipefail
if [[ ! -x run_llama_train.sh ]]; then
  echo "{folder}/start.sh: $PWD has no run_llama_train.sh; start this in the recipe's folder" >&2
  exit 1
fi
case "${{1:-}}" in
{cases}
  *) echo "{folder}/start.sh: '${{1:-}}' is no provider; use one of: {names}" >&2; exit 1 ;;
esac
export NNODES NODE_RANK MASTER_ADDR MASTER_PORT="${{MASTER_PORT:-29500}}" NGPU=1
CONFIG_FILE="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)/$site.toml" exec ./run_llama_train.sh "${{@:2}}"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="NODES.json", help="Ravnest's node_configs.json")
    parser.add_argument("--config", required=True, metavar="FILE.toml", help="the run; its pipeline is replaced")
    parser.add_argument("--syncer", default="https://meet.example.org:29700", help="its address (%(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("plan"), help="folder for a file a site, and start.sh (%(default)s)"
    )
    parser.add_argument(
        "--step_seconds", type=float, default=1.0, help="of computing, where links take less (%(default)s)"
    )
    parser.epilog = "Options of the run may follow --, as --swarm.codec int4."


def run(args: argparse.Namespace, options: Sequence[str]) -> None:
    from titan_planner.places.ravnest import read_providers
    from titan_planner.sites.clusters import form
    from torchtitan.observe.log import logger

    if args.out.exists():
        raise Refusal(f"--out {args.out} exists; remove it, or name another")
    providers = read_providers(args.file)
    addresses = {
        name: str(node.get("IP", "")).partition(":")[0] for name, node in json.loads(args.file.read_text()).items()
    }
    if lacking := [name for name, address in addresses.items() if not address]:
        raise Refusal(f"{args.file}: provider {lacking[0]} has no IP; the stages of a site reach each other by it")
    words = ["--job.config_file", args.config, *options]
    _, blueprint = load_run_or_exit(words, None, 0, prog="swarm plan")
    said, logger.disabled = logger.disabled, True  # every cut that is tried says so
    try:
        sites = form(args, blueprint, providers, words)
    finally:
        logger.disabled = said
    for line in _table(sites, args.step_seconds):
        print(line)
    used = {provider.name for site in sites for provider in site.providers}
    if idle := [provider.name for provider in providers if provider.name not in used]:
        print(f"left out, for no cut of the model leaves them a part that fits: {', '.join(idle)}")
    _write(args.out, sites, addresses)
    host = args.syncer.partition("//")[2].rpartition(":")[0]
    print(f"once: python -m torchtitan swarm keys --syncer {host} --sites {','.join(site.name for site in sites)}")
    print(f"at {host}: python -m torchtitan swarm serve {args.out}/{sites[0].name}.toml --keys keys/syncer")
    print(f"at each provider: {args.out}/start.sh PROVIDER, with {args.out} and keys/SITE there")


def _table(sites: Sequence["Site"], step_seconds: float) -> list[str]:
    codec = sites[0].config.swarm.codec
    steps = [max(step_seconds, site.seconds_of_a_step()) for site in sites]
    share = [1 / each / sum(1 / step for step in steps) for each in steps]
    head = f"meeting, s in {codec}"
    lines = [
        f"{'site':8} {'links, s a step':>15} {'tokens':>7} {head:>20} {'in steps':>8}  providers (parts, memory filled)"
    ]
    for site, step, part in zip(sites, steps, share, strict=True):
        meeting = site.seconds_of_a_meeting(codec)
        counts = [str(count) for count in site.counts] or ["all"]
        held = ", ".join(
            f"{p.name} ({n}, {rank.peak_bytes / 2**20 / p.megabytes:.0%})"
            for p, n, rank in zip(site.providers, counts, site.ranks, strict=True)
        )
        numbers = f"{site.seconds_of_a_step():15.2f} {part:7.1%} {meeting:20.2f} {math.ceil(meeting / step):8}"
        lines.append(f"{site.name:8} {numbers}  {held}")
    every = max(math.ceil(site.seconds_of_a_meeting(codec) / step) for site, step in zip(sites, steps, strict=True))
    lines.append(f"with swarm.every = {every} or more, a meeting is over before the next at each site; by codec:")
    for codec in ("float32", "bfloat16", "int8", "int4"):
        slowest = max(sites, key=lambda site: site.seconds_of_a_meeting(codec))
        lines.append(
            f"  {codec:8} a meeting takes {slowest.seconds_of_a_meeting(codec):.2f} s at {slowest.name}, the slowest"
        )
    if len(sites) > 1 and min(share) < 0.5 / len(sites):
        least = sites[share.index(min(share))]
        lines.append(
            f"{least.name} brings {min(share):.1%} of the tokens, as its slowest link allows; the others train as fast "
            "without it"
        )
    if sites[0].config.swarm.every_seconds is None and max(steps) > 1.2 * min(steps):
        lines.append("the sites' speeds differ: set swarm.every_seconds, so that they meet by time")
    return lines


def _write(out: Path, sites: Sequence["Site"], addresses: dict[str, str]) -> None:
    from titan_planner.plan.choice import to_text

    out.mkdir(parents=True)
    cases = []
    for site in sites:
        job = site.config.job.model_copy(update={"dump_folder": f"{site.config.job.dump_folder}/{site.name}"})
        parallelism = site.config.parallelism.model_copy(update={"pipeline_parallel_memory_gib": None})
        text, _ = to_text(site.config.model_copy(update={"job": job, "parallelism": parallelism}), len(site.providers))
        (out / f"{site.name}.toml").write_text(text, encoding="utf-8")
        for rank, provider in enumerate(site.providers):
            head = shlex.quote(addresses[site.providers[0].name])
            place = f"site={site.name} NNODES={len(site.providers)} NODE_RANK={rank} MASTER_ADDR={head}"
            cases.append(f"  {shlex.quote(provider.name)}) {place} ;;")
    script = out / "start.sh"
    names = " ".join(provider.name for site in sites for provider in site.providers)
    script.write_text(_SCRIPT.format(folder=out, cases="\n".join(cases), names=names), encoding="utf-8")
    script.chmod(0o755)
