"""Keys of a swarm: one model that several sites train over slow links."""

from typing import Annotated, Literal

from pydantic import Field

from torchtitan.config.section import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section

Address = Annotated[str, Field(pattern=r"^https://[^/]+$")]


class Swarm(Section):
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

    outer_momentum: Fraction = 0.9
    """Momentum of the outer step of `diloco`. Not in torchtitan."""

    mix: Fraction = 0.0
    """How much of a site's weights stays when the merged ones arrive. With 0 the site takes the merged ones, and what
    it learned while they travelled. Not in torchtitan."""

    @property
    def addresses(self) -> list[str]:
        """Of all syncers; empty: the run trains alone."""
        return [self.syncer] if self.syncer is not None else list(self.syncers)
