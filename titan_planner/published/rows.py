"""Reads published runs, and predicts them.

Two kinds of files are read: Megatron-LM's (a [device], [[network]] levels, shapes in the rows) and torchtitan's (a
table of [hardware], models by family and flavor). A row of either may say more than the examples do.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from titan_planner.plan.cluster import describes, read_toml
from titan_planner.plan.cost import Device, Layout, Machine, Rates, Seconds, step
from titan_planner.plan.memory import in_arrays, sizes_of, staged, whole
from titan_planner.published import megatron_memory
from titan_planner.published.keys import Keys
from titan_planner.published.work import NAMES, read_work
from torchtitan.models.operations import Attention, Share, Work
from torchtitan.refusal import Refusal

_INSIDE = {"A100": 300, "A800": 200, "H100": 450, "H200": 450, "H800": 200, "H20": 450, "GH200": 450}  # NVLink, GB/s
_INSIDE |= {"B200": 900, "B300": 900, "GB200": 900, "GB300": 900, "V100": 150}  # in one direction, by data sheets
_NAMES = NAMES | {
    "gpus": "gpus devices world_size",
    "tp": "tp tensor_parallel",
    "pp": "pp pipeline_parallel",
    "cp": "cp context_parallel",
    "ep": "ep expert_parallel",
    "dp": "dp_shard data_parallel dp",
    "replicas": "dp_replicate replicas",
    "microbatch": "microbatch microbatch_size micro_batch_size",
    "microbatches": "microbatches num_microbatches",
    "local_batch": "local_batch local_batch_size",
    "global_batch": "global_batch global_batch_size",
    "flops": "peak_bf16_tflops matrix_tflops peak_tflops bf16_tflops peak_fp16_tflops",
    "float8": "float8 fp8 precision",
    "memory": "memory_gib peak_memory_gib reserved_gib allocated_gib",
}
_RECOMPUTES = {"none": "none", "false": "none", "full": "full", "true": "full", "block": "full", "selective": ""}
_RECOMPUTES |= {each: each for each in ("selective op", "every second layer", "attention")}
_NOT_FLOAT8 = ("none", "false", "bf16", "bfloat16", "fp16", "float16")
_SCHEDULES = ("", "none", "1f1b", "interleaved1f1b", "gpipe")
_FIX = ", or name the row in --leave_out; docs/planner/published.md has the formats"


@dataclass(frozen=True)
class Row:
    """One measured run."""

    name: str
    group: str  # of runs that differ in little
    device: Device
    work: Work
    layout: Layout
    seconds: float
    memory_bytes: float | None = None  # measured
    logit_bytes: float = 2  # of each logit in the loss, if nothing fits it
    assumed: tuple[str, ...] = ()  # what the file does not say

    def predict(self, rates: Rates) -> Seconds:
        return step(Machine(self.device, rates), self.work, self.layout)

    def error(self, rates: Rates) -> float:
        return float(self.predict(rates).total) / self.seconds - 1

    def bytes(self, logits: float = 1.0, reserved: float = 1.0, pieces: float = 1.0) -> float:
        """At the peak. Where weights are sharded, the pieces of freed gradients stay with the allocator."""
        layout = self.layout
        own = 4 * self.work.num_parameters / layout.pp / (layout.dp * layout.cp) if layout.shards else 0
        return reserved * (sum(self.held(logits).values()) + pieces * own)

    def held(self, logits: float = 1.0) -> Mapping[str, float]:
        """Bytes by kind on the fullest rank at its fullest moment."""
        work, layout, ends = self.work, self.layout, self.work.ends
        more = (self.logit_bytes * logits / 2 - 1) * ends.kept["output"]  # the model's own list has two bytes of each
        kept = work.layer.kept
        half = (kept["none"] + kept["full"]) / 2 if layout.recompute == "every second layer" else kept["none"]
        layer = replace(work.layer, kept={layout.recompute: half, **kept})
        work = replace(work, layer=layer, ends=replace(ends, kept={**ends.kept, "none": ends.kept["none"] + more}))
        if not layout.shards:
            return megatron_memory.held(work, layout)
        pp, stages = int(layout.pp), int(layout.pp) * int(layout.stages_per_rank)
        layout = in_arrays(layout)
        if pp == 1:
            return whole(work, layout).at(0)[1]
        each, rest = divmod(int(work.num_layers), stages)
        counts = [each + (stage < rest) for stage in range(stages)]
        sized, one = sizes_of(work, layout), np.zeros(1, int)
        first, last = tuple(counts[::pp]), tuple(counts[pp - 1 :: pp])
        ranks = staged(work, layout, sized, [first], one, 0), staged(work, layout, sized, [last], one, pp - 1)
        return max(ranks, key=lambda held: float(held.peak[0])).at(0)[1]


def read_tables(path: Path) -> dict[str, Any]:
    tables = read_toml(path)
    rows = tables.get("row")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise Refusal(f"{path} has no [[row]]; docs/planner/published.md describes the two formats")
    return tables


def name_of(row: Mapping[str, Any], number: int) -> str:
    return str(row.get("name", row.get("id", number)))


def read_rows(path: Path, leave_out: Iterable[str] = ()) -> list[Row]:
    tables = read_tables(path)
    named = {name_of(row, i): row for i, row in enumerate(tables["row"], 1)}
    if len(named) < len(tables["row"]):
        raise Refusal(f"{path} has two rows with one name; give each its own")
    with describes(path, "runs"):
        return [_row(path, tables, name, row) for name, row in named.items() if name not in leave_out]


def _row(path: Path, tables: Mapping[str, Any], name: str, row: Mapping[str, Any]) -> Row:
    is_torchtitan, model, assumed = "hardware" in tables, tables.get("model", {}), list[str]()
    every = {key: value for key, value in model.items() if not isinstance(value, dict)}
    places = (row, _named(tables, "model", row), _named(tables, "source", row), tables.get("run", {}), every)
    keys = Keys(f"{path}, row {name},", places, _NAMES, assumed, _FIX)
    software = keys.find("software", keys.find("where", "") if is_torchtitan else "Megatron")
    by_megatron = "megatron" in str(software).lower()
    device = _device(path, tables, row, assumed)
    layout, share = _layout(keys, by_megatron)
    work = read_work(keys, share, by_megatron)
    # Since it has fused attention, Megatron's interleaved stages send while they compute.
    is_recent = any(isinstance(operation, Attention) for operation in work.layer.operations)
    beside = keys.flag("overlaps_messages", by_megatron and is_recent and layout.stages_per_rank > 1)
    sequences = share.sequences * layout.microbatches * layout.passes * layout.dp * layout.replicas
    if keys.find("step_seconds") is not None:
        seconds = keys.number("step_seconds")
    else:
        seconds = sequences * share.seq_len / keys.number("gpus") / keys.number("tokens_per_second")
    alike = (*(row.get(key) for key in ("model", "flavor", "gpus", "source")), share.seq_len)
    return Row(
        name,
        f"{alike}" if is_torchtitan else name.split()[0],
        device,
        work,
        replace(layout, sends_beside=beside),
        seconds,
        None if keys.find("memory") is None else keys.number("memory") * 2**30,
        # Float32 copies of the logits in Megatron's loss; in torch's; and in torch's over tensor parallelism.
        2 + 4 * (1 if by_megatron else 4 if layout.tp > 1 else 3),
        tuple(assumed),
    )


def _layout(keys: Keys, by_megatron: bool) -> tuple[Layout, Share]:
    tp, pp, cp, replicas = (keys.number(key, 1) for key in ("tp", "pp", "cp", "replicas"))
    gpus = keys.number("gpus")
    dp = keys.number("dp", gpus / (tp * pp * cp * replicas))
    if (product := dp * tp * pp * cp * replicas) != gpus or dp % 1:
        raise keys.refusal(f"has gpus = {gpus}, but its degrees multiply to {product:g}", "correct one of them")
    schedule = keys.word("schedule", _SCHEDULES, "")
    stages = keys.number("stages_per_rank", 2 if "interleaved" in schedule else 1)
    ranks = dp * replicas
    if keys.find("microbatch") is not None:
        micro, passes = keys.number("microbatch"), 1
        microbatches = keys.number("global_batch", assume=micro * ranks) / micro / ranks
    else:
        local = keys.number("local_batch")
        microbatches = keys.number("microbatches", assume=pp) if pp > 1 else keys.number("microbatches", 1)
        micro, passes = local / microbatches, keys.number("global_batch", local * ranks) / (local * ranks)
        if pp == 1:
            microbatches, passes = microbatches * passes, 1
    if microbatches % 1 or passes % 1:
        raise keys.refusal(f"has global_batch = {keys.find('global_batch')}, no multiple of its parts", "correct it")
    mode = _RECOMPUTES[keys.word("recompute", _RECOMPUTES, "none")]
    layout = Layout(
        dp=dp,
        replicas=replicas,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=keys.number("ep", 1),
        microbatches=microbatches,
        passes=passes,
        stages_per_rank=stages,
        recompute=mode or ("attention" if by_megatron else "selective op"),
        compiled=keys.flag("compile", by_megatron),
        float8=str(keys.find("float8", "none")).lower() not in _NOT_FLOAT8,
        async_tp=keys.flag("async_tp", False),
        stops_early=keys.flag("early_stop", not by_megatron),  # torch's default; Megatron recomputes all
        shards=keys.flag("fully_sharded", not by_megatron),
        sequence_split=keys.flag("sequence_parallel", tp > 1),
        overlaps=keys.flag("overlaps_gradients", not by_megatron),
        splits_optimizer=keys.flag("distributed_optimizer", by_megatron),
    )
    return layout, Share(micro, keys.number("seq_len"), tp, cp, layout.ep)


def _named(tables: Mapping[str, Any], kind: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """[kind.NAME] for a row with kind = NAME, without its own note of kind."""
    found = tables[kind].get(row.get(kind), {}) if isinstance(tables.get(kind), dict) else {}
    return found if isinstance(found, dict) else {}


def _device(path: Path, tables: Mapping[str, Any], row: Mapping[str, Any], assumed: list[str]) -> Device:
    if "hardware" in tables:
        sheets = tables["hardware"]
        which = row.get("hardware", next(iter(sheets)) if len(sheets) == 1 else None)
        if which not in sheets:
            raise Refusal(f"{path}: a row has hardware = {which!r}; use one of {', '.join(sheets)}")
        keys = Keys(f"{path}, [hardware.{which}]", (sheets[which],), _NAMES, assumed, "")
        between = keys.number("between_nodes_gbit_per_gpu", assume=200) / 8
        known = next((_INSIDE[part] for part in str(keys.find("name", which)).upper().split() if part in _INSIDE), None)
        inside, per_node = (
            keys.number("inside_gbytes_per_second", known, assume=450),
            keys.number("devices_per_node", 8),
        )
    else:
        keys = Keys(f"{path}, [device]", (tables.get("device", {}),), _NAMES, assumed, "")
        levels = [Keys(f"{path}, [[network]]", (each,), {}, assumed, "") for each in tables.get("network", [])]
        if not levels:
            raise Refusal(f"{path} has no [[network]]; give one inside a node, and one between nodes")
        inside, between = (level.number("gbytes_per_second") for level in (levels[0], levels[-1]))
        per_node = levels[0].number("devices", 8)
    return Device(keys.number("flops") * 1e12, keys.number("memory_gbps") * 1e9, inside * 1e9, between * 1e9, per_node)
