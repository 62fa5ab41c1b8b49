"""A swarm on unlike nodes: each region of a cluster file is a site, with what its meetings cost and what it brings.

A site has the fastest layout of its own nodes. Its line to the syncer's region carries each meeting up and down.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from titan_planner.places.layouts import Found, Layouts, propose
from titan_planner.places.network import Network
from titan_planner.plan.like import job_of
from torchtitan.config.schema import Config
from torchtitan.models.spec import Blueprint
from torchtitan.refusal import Refusal

BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.008, "int4": 0.508}  # a parameter and direction, as measured
# What a well tuned DiLoCo loses at 4 sites beside one run with the same tokens, by parameters (arXiv:2503.09799,
# table 4; by table 5 it is 0.2 % at 4B and 0.3 % at 10B).
PUBLISHED_LOSS = ((35e6, 0.02), (90e6, 0.015), (180e6, 0.011), (335e6, 0.009), (550e6, 0.007), (1.3e9, 0.005),
                  (2.4e9, 0.003))  # fmt: skip
LEAST_SHARE = 0.05  # of the tokens; a site that brings less costs more care than it is worth
_STEPS = 1000  # of the search of one site's layout


@dataclass(frozen=True)
class Site:
    name: str
    tokens_per_second: float  # 0: it does not hold the model
    step_seconds: float
    layout: Found | None
    meeting_seconds: Mapping[str, float]  # by codec: all fragments, up and down

    def least_every(self, codec: str) -> int:
        """Steps between two meetings of a fragment, so that the line carries one while the site trains."""
        return max(1, math.ceil(self.meeting_seconds[codec] / self.step_seconds))

    def least_delay(self, codec: str, fragments: int) -> int:
        """Steps that one fragment travels."""
        return max(1, math.ceil(self.meeting_seconds[codec] / fragments / self.step_seconds))


def sites_of(
    network: Network, config: Config, blueprint: Blueprint, options: Sequence[str], syncer: str, seed: int
) -> list[Site]:
    regions = list(dict.fromkeys(network.regions))
    if len(regions) < 2:
        raise Refusal(f"--swarm: the file has one region, {regions[0]}; a swarm needs two, so name them in the file")
    if syncer not in regions:
        raise Refusal(f"--swarm {syncer} is no region of the file; use one of {', '.join(regions)}")
    at = network.regions.index(syncer)
    return [_site(network, region, at, config, blueprint, options, seed) for region in regions]


def _site(
    network: Network, region: str, at: int, config: Config, blueprint: Blueprint, options: Sequence[str], seed: int
) -> Site:
    nodes = [number for number, name in enumerate(network.regions) if name == region]
    own = network.only(nodes)
    job = job_of(config, blueprint, len(nodes) * network.per_node, options)
    copies = 8 if section_of(config).codec == "float32" else 12  # bytes a parameter, as the dry run counts them
    gib = copies * job.blueprint.num_parameters / (len(nodes) * network.per_node) / 2**30
    sheets = tuple(replace(sheet, memory_gib=max((sheet.memory_gib or 0) - gib, 1e-9)) for sheet in own.sheets)
    found, _ = propose(Layouts(job, replace(own, sheets=sheets)), seed, 1, _STEPS)
    node = nodes[0]
    there, back = network.bandwidth[node, at], network.bandwidth[at, node]
    delay = float(network.delay[node, at] + network.delay[at, node]) * section_of(config).fragments
    gigabits = {codec: 8e-9 * size * job.blueprint.num_parameters for codec, size in BYTES.items()}
    meeting = {codec: float(each / there + each / back) + delay for codec, each in gigabits.items()}
    if not found:
        return Site(region, 0.0, np.inf, None, meeting)
    seconds = found[0].plan.seconds
    return Site(region, job.global_batch * job.seq_len / seconds, seconds, found[0], meeting)


def section_of(config: Config) -> Any:
    """[swarm], which titan_fleet adds to a configuration."""
    section = getattr(config, "swarm", None)
    if section is None:
        raise Refusal("this plans what titan_fleet trains, and that folder is not here; add it")
    return section


def text(sites: Sequence[Site], config: Config, syncer: str, together: float, parameters: int) -> list[str]:
    """`together`: tokens a second of one run on all nodes; 0 if none fits."""
    section, training = section_of(config), [site for site in sites if site.layout]
    if not training:
        return ["as a swarm: no region alone holds the model with a site's copies"]
    total = sum(site.tokens_per_second for site in training)
    beside = f", where one run on all nodes makes {together:,.0f}" if together else ""
    lines = [
        f"as a swarm around a syncer in {syncer}: {total:,.0f} tokens/s{beside}; a site's copies count in its memory",
        f"  {'site':12} {'s a step':>9} {'tokens/s':>10} {'share':>6}   meeting, s (least swarm.every) by codec",
    ]
    for site in sites:
        if site not in training:
            lines.append(f"  {site.name:12} does not hold the model with a site's copies, so it stays out")
            continue
        costs = ", ".join(f"{codec} {site.meeting_seconds[codec]:.1f} ({site.least_every(codec)})" for codec in BYTES)
        share = site.tokens_per_second / total
        lines.append(
            f"  {site.name:12} {site.step_seconds:9.3f} {site.tokens_per_second:10,.0f} {share:6.1%}   {costs}"
        )
    every = max(site.least_every(section.codec) for site in training)
    delay = max(site.least_delay(section.codec, section.fragments) for site in training)
    fits = "is enough" if section.every >= every else f"is too few for {section.codec}: lines would not keep up"
    lines.append(
        f"  swarm.every = {section.every} {fits}; {section.codec} in {section.fragments} fragments needs every >= "
        f"{every} and delay >= {delay}"
    )
    return [*lines, _loss(config, parameters), *_advice(training, total, section.codec, every)]


def loss_of_meeting(parameters: int) -> tuple[str, float]:
    """Share that is lost: between the published sizes a line through the logarithms, beyond them a bound."""
    sizes, losses = np.log(PUBLISHED_LOSS).T
    size = math.log(parameters)
    bound = "more than " if size < sizes[0] else "at most " if size > sizes[-1] else ""
    return bound, math.exp(np.interp(size, sizes, losses))


def _loss(config: Config, parameters: int) -> str:
    bound, share = loss_of_meeting(parameters)
    return (
        f"  loss: {bound}{share:+.1%} beside one run with the same tokens, as published for 4 sites and tuned rates "
        f"(arXiv:2503.09799); meetings planned: {config.training.steps // section_of(config).every}"
    )


def _advice(training: Sequence[Site], total: float, codec: str, every: int) -> list[str]:
    lines = []
    for site in training:
        share, own = site.tokens_per_second / total, site.least_every(codec)
        others = max((each.least_every(codec) for each in training if each is not site), default=own)
        if share < LEAST_SHARE:
            lines.append(f"  {site.name} brings {share:.1%} of the tokens; leave it out, unless its data is wanted")
        elif own == every and own > 4 * others:
            lines.append(
                f"  {site.name}'s line alone asks for every >= {own}, the others' for {others}: use a smaller codec, "
                f"or leave it out and lose {share:.1%} of the tokens"
            )
    steps = [site.step_seconds for site in training]
    if max(steps) > 1.2 * min(steps):
        lines.append("  the sites' speeds differ: set swarm.every_seconds, so that they meet by time")
    return lines
