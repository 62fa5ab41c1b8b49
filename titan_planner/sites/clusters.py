"""Sites of a swarm out of unlike providers: clusters that each hold the model, as pipelines cut to their memory."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from titan_planner.places.ravnest import MOST_CLUSTERS, Provider, spread
from titan_planner.places.swarm import BYTES
from torchtitan.config.load import ConfigError, load_config
from torchtitan.config.schema import Config
from torchtitan.models.rules import find_refusals
from torchtitan.models.spec import Blueprint
from torchtitan.refusal import Refusal
from torchtitan.tools.dry_run.cut import fit
from torchtitan.tools.dry_run.estimate import Estimate, check_estimable, derived, estimate, with_counts

FILLED = 0.9  # of a provider's memory


@dataclass(frozen=True)
class Site:
    """A cluster that trains the whole model: a stage of its pipeline on each provider, in this order."""

    name: str
    providers: Sequence[Provider]
    config: Config
    ranks: Sequence[Estimate]

    @property
    def counts(self) -> list[int]:
        return list(self.config.parallelism.pipeline_parallel_layer_counts or [])

    def seconds_of_a_step(self) -> float:
        """Of its slowest link, over which stages exchange; a link is as fast as its slower end, in both directions."""
        slowest, ahead, back = 0.0, 0, 0
        for rank, (one, other) in enumerate(zip(self.providers, self.providers[1:], strict=False)):
            moved = self.ranks[rank].moved
            ahead, back = moved.get("send", 0) - back, moved.get("recv", 0) - ahead
            slowest = max(slowest, 8e-6 * max(ahead, back) / min(one.megabits, other.megabits))
        return slowest

    def seconds_of_a_meeting(self, codec: str) -> float:
        """All fragments up and down; each provider exchanges what it holds."""
        each = zip(self.ranks, self.providers, strict=True)
        return max(2 * 8e-6 * BYTES[codec] * rank.parameters / provider.megabits for rank, provider in each)


def form(
    args: argparse.Namespace, blueprint: Blueprint, providers: Sequence[Provider], options: Sequence[str]
) -> list[Site]:
    """As many sites as hold the model, up to Ravnest's five: the first number of which every cut fits.

    Of a cluster that cannot be cut so, the smallest provider stays out.
    """
    alone = [*_place(args, "site-1"), "--parallelism.pipeline_parallel_degree", "1"]
    whole = load_config([*options, *alone], 1, prog="swarm plan")
    check_estimable(whole)
    one = estimate(whole, derived(whole, blueprint, 1), 0, 1, gpu=False)  # of a site of one provider, whichever it is
    why = ""
    for count in range(min(MOST_CLUSTERS, len(providers)), 0, -1):
        sites = []
        try:
            for number, members in enumerate(spread(providers, count, one.peak_bytes / 2**20 / FILLED)):
                own = ["--swarm.sites", str(count), "--swarm.quorum", str(min(2, count))]
                name, asked = f"site-{number + 1}", [*options, *own]
                sites.append(_largest(members, partial(_site, name, blueprint, asked, args, one)))
        except (ConfigError, Refusal) as refusal:
            why = f"{count} sites: {refusal}"
            continue
        return sites
    raise Refusal(f"the model does not fit these {len(providers)} providers. {why}")


def _largest(members: Sequence[Provider], form_site: Callable[[Sequence[Provider]], Site]) -> Site:
    ordered = sorted(members, key=lambda provider: -provider.megabytes)
    for count in range(len(ordered), 1, -1):
        try:
            return form_site(ordered[:count])
        except Refusal:
            continue
    return form_site(ordered[:1])


def _site(
    name: str,
    blueprint: Blueprint,
    options: Sequence[str],
    args: argparse.Namespace,
    one: Estimate,
    members: Sequence[Provider],
) -> Site:
    ordered = sorted(members, key=lambda provider: (-provider.megabits, -provider.megabytes))
    limits = [FILLED * provider.megabytes / 1024 for provider in ordered]
    own = [*_place(args, name), "--parallelism.pipeline_parallel_schedule", "1F1B"]
    own += ["--parallelism.pipeline_parallel_degree", str(len(ordered))]
    if len(ordered) > 1:
        own += ["--parallelism.pipeline_parallel_memory_gib", *(f"{limit:g}" for limit in limits)]
    config = load_config([*options, *own], len(ordered), prog="swarm plan")
    if refused := list(find_refusals(blueprint, config)):  # more providers than microbatches, say
        raise Refusal("; ".join(refused))
    if (world := len(ordered)) == 1:
        if one.peak_bytes > limits[0] * 2**30:
            raise Refusal(f"{ordered[0].name} alone holds {limits[0]:.2f} GiB, and needs {one.peak_bytes / 2**30:.2f}")
        return Site(name, ordered, config, [one])
    config = with_counts(config, fit(config, blueprint, world))
    known = derived(config, blueprint, world)
    return Site(name, ordered, config, [estimate(config, known, rank, world, gpu=False) for rank in range(world)])


def _place(args: argparse.Namespace, name: str) -> list[str]:
    return ["--swarm.syncer", args.syncer, "--swarm.site", name, "--swarm.keys", f"keys/{name}"]
