"""Keys of a swarm: one model that several sites train over slow links. The recipe reads them by this file's name."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from torchtitan.config.section import (
    Finding,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    OtherSection,
    PositiveFloat,
    PositiveInt,
)

if TYPE_CHECKING:
    from torchtitan.config.schema import Config

Address = Annotated[str, Field(pattern=r"^https://[^/]+$")]


class Swarm(OtherSection):
    """One model that several sites train over slow links (docs/fleet/swarm.md)."""

    syncer: Address | None = None
    """Address of the syncer, as https://meet.example.org:29700. Without it the run trains alone. Not in torchtitan."""

    syncers: list[Address] = Field(default=[])
    """Addresses of several syncers, in place of `syncer`, in the same order at all sites. Each serves a share of the
    fragments, so no single machine carries all traffic. Not in torchtitan."""

    site: Annotated[str, Field(min_length=1)] | None = None
    """Name of this site, which its certificate must hold. Not in torchtitan."""

    keys: Annotated[str, Field(min_length=1)] | None = None
    """Folder with this site's certificate, its key and the authority's certificate, as `swarm keys` makes them. Not in
    torchtitan."""

    every: PositiveInt = 100
    """Steps from one meeting of a fragment to its next. More steps cost less traffic and a little loss. Not in
    torchtitan."""

    every_seconds: PositiveFloat | None = None
    """Seconds from one meeting of a fragment to its next, instead of `every` steps, so that slow sites meet as often as
    fast ones; each counts by its tokens. Not in torchtitan."""

    fragments: PositiveInt = 4
    """Into how many fragments the model is divided. They meet in turn, so the link is used evenly. Not in
    torchtitan."""

    delay: NonNegativeInt = 10
    """Steps that a site trains on while a fragment travels; what the others learned is taken after them. Choose it so
    that the fragment has arrived by then. Not in torchtitan."""

    codec: Literal["float32", "bfloat16", "int8", "int4"] = "int8"
    """How numbers travel in both directions. `int8` and `int4` have a scale for each 256 numbers, and what rounding
    loses is sent the next time. Not in torchtitan."""

    quorum: PositiveInt = 2
    """The fewest sites whose differences are merged. If it equals `sites`, all wait for all, and the run repeats to
    the bit. Not in torchtitan."""

    grace_seconds: NonNegativeFloat = 30.0
    """How long a merge waits for further sites once the quorum is there. Not in torchtitan."""

    sites: PositiveInt = 8
    """The most sites that ever take part. The training data is divided into so many parts, and each site reads its
    own. Not in torchtitan."""

    method: Literal["diloco", "average"] = "diloco"
    """`diloco` takes the mean difference as a gradient, for Nesterov's momentum; `average` takes the mean of the
    weights, as Ravnest does. Not in torchtitan."""

    outer_lr: PositiveFloat = 0.7
    """Learning rate of the outer step of `diloco`. Not in torchtitan."""

    outer_momentum: Fraction = 0.6
    """Momentum of the outer step of `diloco`. The anchor moves outer_lr / (1 - outer_momentum) times as far as sites
    do, so a larger one needs a lower `optimizer.lr` and hundreds of meetings. Not in torchtitan."""

    mix: Fraction = 0.0
    """How much of a site's weights stays when the merged ones arrive. With 0 the site takes the merged ones, and what
    it learned while they travelled. Not in torchtitan."""

    @property
    def addresses(self) -> list[str]:
        """Of all syncers; empty: the run trains alone."""
        return [self.syncer] if self.syncer is not None else list(self.syncers)

    @property
    def joins(self) -> str | None:
        return "titan_fleet.swarm.join:join" if self.addresses else None

    @property
    def num_copies(self) -> int:
        """Of the anchor, of what was sent, and of what rounding kept."""
        return 0 if not self.addresses else 2 if self.codec == "float32" else 3

    def conflicts(self) -> Iterator[Finding]:
        if self.addresses and (self.site is None or self.keys is None):
            yield (
                ("swarm.syncer", "swarm.syncers", "swarm.site", "swarm.keys"),
                f"a swarm's syncer ({self.addresses[0]}) needs this site's name and keys; set swarm.site and "
                "swarm.keys to what `python -m torchtitan swarm keys` made",
            )
        if self.syncer is not None and self.syncers:
            yield (
                ("swarm.syncer", "swarm.syncers"),
                f"swarm.syncer = {self.syncer} and swarm.syncers are both set; name one syncer, or a list of several",
            )
        if len(self.syncers) > self.fragments:
            yield (
                ("swarm.syncers", "swarm.fragments"),
                f"swarm.syncers names {len(self.syncers)} syncers for swarm.fragments = {self.fragments}, so some "
                "would serve nothing; name fewer, or raise swarm.fragments",
            )
        if len(set(self.syncers)) < len(self.syncers):
            yield (
                ("swarm.syncers",),
                f"swarm.syncers names an address twice ({', '.join(self.syncers)}); name it once",
            )
        if self.quorum > self.sites:
            yield (
                ("swarm.quorum", "swarm.sites"),
                f"swarm.quorum = {self.quorum} is more than swarm.sites = {self.sites}, so nothing would ever be "
                "merged; lower it, or raise swarm.sites",
            )
        if self.every_seconds is None and self.delay >= self.every:
            yield (
                ("swarm.delay", "swarm.every"),
                f"swarm.delay = {self.delay} is no less than swarm.every = {self.every}, so a fragment would travel "
                f"beyond its next turn; use at most {self.every - 1}",
            )


def swarm_of(config: "Config") -> Swarm:
    """The section of a loaded configuration."""
    section = getattr(config, "swarm")  # noqa: B009  (the recipe's own class has no such field)
    assert isinstance(section, Swarm)
    return section
