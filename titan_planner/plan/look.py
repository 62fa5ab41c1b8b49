"""What a plan's numbers consist of, and its pipeline as a picture."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from titan_planner.plan.cluster import Cluster
from titan_planner.plan.cost import Layout
from titan_planner.plan.pipeline.timeline import Timeline
from titan_planner.plan.search import Choice, Job
from torchtitan.models.operations import Attention, Exchange, Operation, Pass, Product, Share
from torchtitan.refusal import Refusal

COLORS = {"F": "#6aa9e9", "B": "#f0a860", "I": "#f0a860", "W": "#8cc98c"}
KINDS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
_SVG_WIDTH, _SVG_ROW = 1200, 22
_LEFT, _TOP = 70, 30


def operations(job: Job, cluster: Cluster, choice: Choice, counts: Mapping[int, Sequence[int]]) -> str:
    """Seconds of each operation of a layer and of the ends, on one microbatch, and how often a rank does them."""
    machine, rates = cluster.machine, cluster.machine.rates
    assert job.blueprint.spec.operations is not None
    work = job.blueprint.spec.operations(
        job.blueprint.shape, Share(choice.microbatch, job.seq_len, choice.tp, choice.cp, choice.ep)
    )
    layout = Layout(
        tp=choice.tp,
        cp=choice.cp,
        ep=choice.ep,
        dp=choice.dp,
        replicas=choice.replicas,
        recompute=choice.recompute,
        compiled=job.compiled,
        float8=job.float8,
        async_tp=job.async_tp,
        wide=job.wide,
    )
    stages = counts[choice.pp * choice.stages_per_rank] if choice.pp > 1 else (work.num_layers,)
    most = max(sum(stages[rank :: choice.pp]) for rank in range(choice.pp))
    times = choice.microbatches * choice.passes
    lines = [
        f"a microbatch in milliseconds; the fullest rank computes {most} layers {times} times:",
        f"  {'forward':>9} {'backward':>9} {'again':>9}  in a layer",
    ]
    plain = replace(layout, recompute="none")
    for block, place, how in ((work.layer, "layer", layout), (work.ends, "ends", plain)):
        if place == "ends":
            lines.append(f"  {'':>29}  after the last layer")
        for one in block.operations:
            seconds = [float(part) for part in machine.seconds(one, how)]
            if any(seconds):
                lines.append("  " + " ".join(f"{1000 * part:9.3f}" for part in seconds) + f"  {described(one)}")
        if place == "layer":
            lines.append(f"  {1000 * rates.layer:9.3f} {1000 * rates.layer:9.3f} {0:9.3f}  whatever a layer computes")
        again = choice.regathers * (place == "layer")
        gather, scatter = (1000 * float(part) for part in machine.exchange(block.parameters, layout, block.experts))
        how_often = "once a pass" if choice.pp > 1 else "beside the layer before"
        lines.append(f"  {gather:9.3f} {again * gather + scatter:9.3f} {0:9.3f}  FSDP, {how_often}")
    return "\n".join(lines)


def described(one: Operation) -> str:
    if isinstance(one, Product):
        times = f"{one.count:g} x " if one.count != 1 else ""
        return f"{times}product [{one.rows:,.0f}, {one.inner:,.0f}] [{one.inner:,.0f}, {one.columns:,.0f}]"
    if isinstance(one, Attention):
        return f"attention, {one.flops / 1e9:,.1f} GFLOP"
    if isinstance(one, Exchange):
        return f"{one.count} x {one.kind} of {one.bytes / 2**20:,.1f} MiB over {one.axis}"
    assert isinstance(one, Pass)
    return f"passes over memory, {(one.forward + one.backward) / 2**20:,.1f} MiB"


def consists_of(kind: str, kinds: Mapping[str, float], kept: float, states: float) -> list[tuple[str, float]]:
    """The parts of a kind of bytes. The optimizer's states say how large a rank's own part of the weights is."""
    size, own = kinds[kind], kinds["optimizer"] * 4 / states
    if kind == "parameters":
        return [("own weights, 4 bytes each", min(own, size)), ("gathered or cast for products", size - own)]
    if kind == "gradients":
        return [("own, 4 bytes each", min(own, size)), ("whole, before their scatter", size - own)]
    if kind == "optimizer":
        return [("first moments", size / 2), ("second moments", size / 2)]
    number = int(size // kept) if kept else 0
    return [(f"kept for backward, as of {number} layers", number * kept), ("of this moment", size - number * kept)]


def draw(path: Path, title: str, timeline: Timeline, hop: float) -> None:
    if path.suffix != ".svg":
        raise Refusal(f"--drawing {path}: a drawing is an .svg; name one")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_svg(title, timeline, hop), encoding="utf-8")


def messages(timeline: Timeline) -> Iterator[tuple[int, int, float]]:
    """From rank, to rank, and when it leaves: outputs to the next stage, and their gradients back."""
    holder = {span.action.stage: rank for rank, spans in enumerate(timeline.spans) for span in spans}
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            to = holder.get(span.action.stage + {"F": 1, "B": -1, "I": -1, "W": 0}[span.action.kind], rank)
            if to != rank:
                yield rank, to, span.end


def to_svg(title: str, timeline: Timeline, hop: float) -> str:
    """Ranks from top to bottom, time from left to right; the paler a stage, the later it comes on its rank.

    White is idle time, and a line is a message, as a legend below the ranks says.
    """
    scale = (_SVG_WIDTH - _LEFT) / timeline.seconds
    height = _TOP + _SVG_ROW * len(timeline.spans) + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_SVG_WIDTH + 10}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/><text x="5" y="18">{escape(title)}</text>'
    ]
    for rank, spans in enumerate(timeline.spans):
        top = _TOP + _SVG_ROW * rank
        stages = sorted({span.action.stage for span in spans})
        lines.append(f'<text x="5" y="{top + 15}">rank {rank}</text>')
        for span in spans:
            left, width = _LEFT + span.begin * scale, max(0.3, (span.end - span.begin) * scale - 0.4)
            pale = 1 - 0.6 * stages.index(span.action.stage) / len(stages)
            said = f"{KINDS[span.action.kind]} of stage {span.action.stage}, microbatch {span.action.microbatch}"
            said += f": {span.begin:.3f} to {span.end:.3f} s"
            place = f'x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_SVG_ROW - 3}"'
            color = f'fill="{COLORS[span.action.kind]}" fill-opacity="{pale:.2f}"'
            lines.append(f"<rect {place} {color}><title>{escape(said)}</title></rect>")
    for rank, to, leaves in messages(timeline):
        ends = [
            (_LEFT + at * scale, _TOP + _SVG_ROW * row + _SVG_ROW / 2)
            for at, row in ((leaves, rank), (leaves + hop, to))
        ]
        (x, y), (x2, y2) = ends
        lines.append(f'<line x1="{x:.1f}" y1="{y}" x2="{x2:.1f}" y2="{y2}" stroke="#555" stroke-width="0.4"/>')
    lines += legend(timeline, height - 15)
    lines.append(f'<text x="{_LEFT}" y="{height - 15}">0 s</text>')
    lines.append(f'<text x="{_SVG_WIDTH}" y="{height - 15}" text-anchor="end">{timeline.seconds:.2f} s</text></svg>')
    return "\n".join(lines) + "\n"


def legend(timeline: Timeline, bottom: int) -> Iterator[str]:
    """What colors and lines mean, in a row between both ends of the time axis."""
    left, kinds = _LEFT + 110, {span.action.kind for spans in timeline.spans for span in spans}
    for name, color in ((KINDS[kind], COLORS[kind]) for kind in COLORS if kind in kinds):
        yield f'<rect x="{left}" y="{bottom - 10}" width="12" height="12" fill="{color}"/>'
        yield f'<text x="{left + 18}" y="{bottom}">{name}</text>'
        left += 60 + 6 * len(name)
    several = any(len({span.action.stage for span in spans}) > 1 for spans in timeline.spans)
    rest = "message; white: the rank waits" + "; paler: a later stage of the rank" * several
    yield f'<line x1="{left}" y1="{bottom - 2}" x2="{left + 16}" y2="{bottom - 8}" stroke="#555" stroke-width="0.8"/>'
    yield f'<text x="{left + 22}" y="{bottom}">{rest}</text>'
