"""Reads published runs, and predicts them.

Two kinds of files are read: Megatron-LM's (a [device], [[network]] levels, shapes in the rows) and torchtitan's (a
table of [hardware], models by family and flavor). A row of either may say more than the examples do.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli

from torchtitan.models import megatron as models_of_megatron
from torchtitan.models.families import find_spec
from torchtitan.models.operations import Share, Work
from torchtitan.planner import megatron
from torchtitan.planner.calibrate import fit as fit
from torchtitan.planner.cost import Device, Layout, Machine, Rates, Seconds, step
from torchtitan.planner.memory import Held, staged, whole
from torchtitan.refusal import Refusal

_INSIDE = {"A100": 300, "A800": 200, "H100": 450, "H200": 450, "H800": 200, "H20": 450, "GH200": 450}  # NVLink, GB/s
_INSIDE |= {"B200": 900, "B300": 900, "GB200": 900, "GB300": 900, "V100": 150, "MI250X": 250, "MI300X": 448}  # one way
# Other names of a key, in the order in which they are looked for.
_NAMES = {
    "name": "name id",
    "hidden": "hidden dim hidden_size d_model",
    "feedforward": "feedforward hidden_dim ffn_hidden ffn_hidden_size intermediate_size",
    "heads": "heads n_heads num_heads",
    "kv_heads": "kv_heads n_kv_heads num_kv_heads query_groups num_query_groups",
    "head_dim": "head_dim head_size",
    "layers": "layers n_layers num_layers",
    "vocab_size": "vocab_size vocabulary",
    "seq_len": "seq_len sequence_length",
    "gpus": "gpus devices world_size",
    "tp": "tp tensor_parallel",
    "pp": "pp pipeline_parallel",
    "cp": "cp context_parallel",
    "dp": "dp_shard data_parallel dp",
    "replicas": "dp_replicate replicas",
    "microbatch": "microbatch microbatch_size micro_batch_size",
    "microbatches": "microbatches num_microbatches",
    "local_batch": "local_batch local_batch_size",
    "global_batch": "global_batch global_batch_size",
    "fused_attention": "fused_attention flash_attention",
    "gated": "gated swiglu",
    "flops": "peak_bf16_tflops matrix_tflops peak_tflops bf16_tflops peak_fp16_tflops",
    "tied": "tied_embeddings tied",
    "memory": "memory_gib peak_memory_gib reserved_gib allocated_gib",
}
_FIELDS = {"hidden": "dim", "feedforward": "hidden_dim", "heads": "n_heads", "kv_heads": "n_kv_heads"}
_FIELDS |= {"layers": "n_layers", "vocab_size": "vocab_size", "head_dim": "head_dim"}  # of a family's shape
_RECOMPUTES = {"none": "none", "no": "none", "false": "none", "full": "full", "true": "full", "block": "full"}
_RECOMPUTES |= {"selective op": "selective op", "every second layer": "every second layer", "attention": "attention"}
_RECOMPUTES |= {"selective": "attention", "core attention": "attention"}  # as Megatron says it
_SCHEDULES = ("", "none", "1f1b", "interleaved1f1b", "interleaved 1f1b", "gpipe")
_EXPERTS = ("experts", "num_experts", "n_experts", "expert_parallel", "ep", "expert_num")


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
    logit_bytes: float = 14  # of each logit in the loss, if nothing fits it
    assumed: tuple[str, ...] = ()  # what the file does not say

    def predict(self, rates: Rates) -> Seconds:
        return step(Machine(self.device, rates), self.work, self.layout)

    def error(self, rates: Rates) -> float:
        return float(self.predict(rates).total) / self.seconds - 1

    def bytes(self, logits: float = 1.0, reserved: float = 1.0, pieces: float = 1.0) -> float:
        """At the peak. What the allocator reserves, and that sharded gradients' pieces stay in it, is FSDP's own."""
        layout = self.layout
        own = 4 * self.work.num_parameters / layout.pp / (layout.dp * layout.cp) if layout.shards else 0
        return reserved * (float(self.held(logits).peak) + pieces * own)

    def held(self, logits: float = 1.0) -> Held:
        work, layout, ends = self.work, self.layout, self.work.ends
        more = (self.logit_bytes * logits / 2 - 1) * ends.kept["output"]  # the model's own list has two bytes of each
        work = replace(work, ends=replace(ends, kept=ends.kept | {"none": ends.kept["none"] + more}))
        if not layout.shards:
            return megatron.held(work, layout)
        if layout.pp == 1:
            return whole(work, layout)
        ranks = {0: (1, 0), layout.pp - 1: (0, 1)}
        held = [
            staged(work, layout, work.num_layers / layout.pp, megatron.waiting_layers(work, layout, rank), *ends_of)
            for rank, ends_of in ranks.items()
        ]
        return max(held, key=lambda each: float(each.peak))


@dataclass(frozen=True)
class _Keys:
    """A table of a file, with the tables that give its defaults. A key that is missing or wrong is refused by name."""

    where: str
    tables: tuple[Mapping[str, Any], ...]
    assumed: list[str]

    def find(self, key: str, default: Any = None) -> Any:
        for table in self.tables:
            for name in _NAMES.get(key, key).split():
                if name in table:
                    return table[name]
        return default

    def number(self, key: str, default: float | None = None, assume: float | None = None) -> Any:
        """`default`: what is meant where nothing is said; `assume`: what is printed as a guess."""
        value = self.find(key)
        if value is None and default is None and assume is not None:
            self.assumed.append(f"{key} = {assume:g}")
        value = next((each for each in (value, default, assume) if each is not None), None)
        if value is None:
            raise self.refusal(f"lacks {' or '.join(_NAMES.get(key, key).split())}", "add it")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise self.refusal(f"has {key} = {value!r}", "use a positive number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.find(key, default)
        if not isinstance(value, bool):
            raise self.refusal(f"has {key} = {value!r}", "use true or false")
        return value

    def word(self, key: str, known: Iterable[str], default: str) -> str:
        value = str(self.find(key, default)).lower()
        if value not in known:
            raise self.refusal(f"has {key} = {value!r}", f"use one of {', '.join(filter(None, known))}")
        return value

    def refusal(self, what: str, fix: str) -> Refusal:
        return Refusal(f"{self.where} {what}; {fix}, or pass the row to --leave_out (docs/planner.md has the formats)")


def read_tables(path: Path) -> dict[str, Any]:
    try:
        tables = tomli.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomli.TOMLDecodeError) as error:
        raise Refusal(f"{path} cannot be read as TOML: {error}") from None
    rows = tables.get("row")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise Refusal(f"{path} has no [[row]]; docs/planner.md describes the two formats")
    return tables


def name_of(row: Mapping[str, Any], number: int) -> str:
    return str(row.get("name", row.get("id", number)))


def read_rows(path: Path, leave_out: Iterable[str] = ()) -> list[Row]:
    tables = read_tables(path)
    named = {name_of(row, i): row for i, row in enumerate(tables["row"], 1)}
    if len(named) < len(tables["row"]):
        raise Refusal(f"{path} has two rows of one name or id; give each its own")
    return [_row(path, tables, name, row) for name, row in named.items() if name not in leave_out]


def _row(path: Path, tables: Mapping[str, Any], name: str, row: Mapping[str, Any]) -> Row:
    keys = _Keys(f"{path}, row {name}", (row, _table(tables, "source", row), tables.get("run", {})), [])
    if found := next((key for key in _EXPERTS if keys.find(key, 1) not in (0, 1)), None):
        raise keys.refusal(f"has {found} = {keys.find(found)}, but mixtures of experts are not predicted", "remove it")
    is_torchtitan = "hardware" in tables
    default = "torchtitan" if is_torchtitan else "megatron"
    is_megatron = (
        "megatron" in str(keys.find("software", keys.find("where", default) if is_torchtitan else default)).lower()
    )
    device = _device(path, tables, row, keys.assumed)
    layout, share = _layout(keys, is_megatron)
    work = _work(replace(keys, tables=(*keys.tables, *_models(tables, row))), share, is_megatron)
    sequences = share.sequences * layout.microbatches * layout.passes * layout.dp * layout.replicas
    seconds = keys.find("step_seconds")
    if seconds is None:
        seconds = sequences * share.seq_len / keys.number("gpus") / keys.number("tokens_per_second")
    memory = keys.find("memory")
    group = name.split()[0]
    if is_torchtitan:
        group = f"{row.get('model')} {row.get('flavor')}, {row.get('gpus')} GPUs, {row.get('source')}, {share.seq_len}"
    return Row(
        name,
        group,
        device,
        work,
        layout,
        seconds,
        None if memory is None else memory * 2**30,
        6 if is_megatron else 18 if layout.tp > 1 else 14,
        tuple(keys.assumed),
    )


def _layout(keys: _Keys, is_megatron: bool) -> tuple[Layout, Share]:
    tp, pp, cp, replicas = (keys.number(key, 1) for key in ("tp", "pp", "cp", "replicas"))
    gpus = keys.number("gpus")
    dp = keys.number("dp", gpus / (tp * pp * cp * replicas))
    if dp * tp * pp * cp * replicas != gpus:
        raise keys.refusal(
            f"has gpus = {gpus}, but its degrees multiply to {dp * tp * pp * cp * replicas:g}", "correct one"
        )
    schedule = keys.word("schedule", _SCHEDULES, "")
    stages = keys.number("stages_per_rank", 2 if "interleaved" in schedule else 1)
    ranks, whole_batch = dp * replicas, keys.find("global_batch")
    if keys.find("microbatch") is not None:
        micro = keys.number("microbatch")
        microbatches, passes = keys.number("global_batch") / micro / ranks, 1
    else:
        local = keys.number("local_batch")
        microbatches = keys.number("microbatches", assume=pp) if pp > 1 else keys.number("microbatches", 1)
        micro, passes = local / microbatches, (whole_batch or local * ranks) / (local * ranks)
        if pp == 1:
            microbatches, passes = microbatches * passes, 1
    if microbatches % 1 or passes % 1:
        raise keys.refusal(
            f"has global_batch = {whole_batch}, which its ranks do not share in whole batches", "correct it"
        )
    float8 = str(keys.find("float8", "none")).lower()
    split = keys.flag("sequence_parallel", tp > 1) if is_megatron else True
    layout = Layout(
        dp=dp,
        replicas=replicas,
        tp=tp,
        pp=pp,
        cp=cp,
        microbatches=microbatches,
        passes=passes,
        stages_per_rank=stages,
        recompute=_RECOMPUTES[keys.word("recompute", _RECOMPUTES, "none")],
        compiled=keys.flag("compile", is_megatron),
        float8=float8 not in ("none", "false"),
        async_tp=keys.flag("async_tp", False),
        shards=keys.flag("fully_sharded", not is_megatron),
        sequence_split=split,
        overlaps=keys.flag("overlaps_gradients", not is_megatron),
        splits_optimizer=keys.flag("distributed_optimizer", is_megatron),
    )
    return layout, Share(micro, 0, tp, cp)


def _work(keys: _Keys, share: Share, is_megatron: bool) -> Work:
    share = replace(share, seq_len=keys.number("seq_len"))
    family, flavor = str(keys.find("model", "")), str(keys.find("flavor", ""))
    said = {field: keys.find(key) for key, field in _FIELDS.items() if keys.find(key) is not None}
    args: Any = None
    if isinstance(keys.find("model"), str):
        try:
            spec = find_spec(family)
        except Refusal as error:
            raise keys.refusal(
                f"names a model that is not known ({error})", "say its shape and the nearest family"
            ) from None
        if spec.operations is None or spec.shape is None:
            raise keys.refusal(f"names {family}, which does not say what it computes", "give its ModelSpec operations")
        needed = {f.name for f in dataclasses.fields(spec.shape) if f.default is dataclasses.MISSING}
        if flavor in spec.flavors:
            args = replace(spec.flavors[flavor], **said)
        elif needed <= set(said):
            args = spec.shape(**said)
        else:
            lacking = ", ".join(sorted(needed - set(said)))
            raise keys.refusal(f"has flavor = {flavor!r}", f"use one of {', '.join(spec.flavors)}, or say {lacking}")
        if not is_megatron:
            return spec.operations(args, share)
    return _work_of_megatron(keys, share, args)


def _work_of_megatron(keys: _Keys, share: Share, args: Any) -> Work:
    known: Mapping[str, Any] = {} if args is None else {key: getattr(args, field) for key, field in _FIELDS.items()}
    hidden, heads = keys.number("hidden", known.get("hidden")), keys.number("heads", known.get("heads"))
    kv_heads = keys.number("kv_heads", known.get("kv_heads", heads))
    is_llama = keys.flag("gated", bool(known) or kv_heads < heads)
    shape = models_of_megatron.Shape(
        hidden,
        keys.number("feedforward", known.get("feedforward", None if is_llama else 4 * hidden)),
        heads,
        kv_heads,
        keys.number("head_dim", known.get("head_dim") or hidden / heads),
        keys.number("layers", known.get("layers")),
        keys.number("vocab_size", known.get("vocab_size")),
        is_llama,
        keys.flag("tied", getattr(args, "tied_embeddings", not is_llama)),
    )
    kernels = models_of_megatron.Kernels(
        keys.flag("fused_attention", is_llama),
        keys.flag("sequence_parallel", share.tp > 1),
        keys.flag("gathers_again_in_backward", share.tp > 1),
        keys.flag("dropout", not is_llama),
    )
    return models_of_megatron.work(shape, share, kernels)


def _table(tables: Mapping[str, Any], kind: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
    found = tables.get(kind, {})
    found = found.get(row[kind], {}) if kind in row and isinstance(found, dict) else {}
    return found if isinstance(found, dict) else {}


def _models(tables: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """[model.NAME] of a row that names one, and [model] itself, whose keys are all rows'."""
    every = tables.get("model", {})
    return _table(tables, "model", row), {key: value for key, value in every.items() if not isinstance(value, dict)}


def _device(path: Path, tables: Mapping[str, Any], row: Mapping[str, Any], assumed: list[str]) -> Device:
    if "hardware" in tables:
        which = row.get("hardware", next(iter(tables["hardware"])) if len(tables["hardware"]) == 1 else None)
        if which not in tables["hardware"]:
            raise Refusal(f"{path}: a row's hardware = {which!r}; use one of {', '.join(tables['hardware'])}")
        keys = _Keys(f"{path}, [hardware.{which}]", (tables["hardware"][which],), assumed)
        between = keys.number("between_nodes_gbit_per_gpu", assume=200) / 8
        known = next((_INSIDE[part] for part in str(keys.find("name", which)).upper().split() if part in _INSIDE), None)
        inside = keys.number("inside_gbytes_per_second", known, assume=450)
        per_node = keys.number("devices_per_node", 8)
    else:
        keys = _Keys(f"{path}, [device]", (tables.get("device", {}),), assumed)
        levels = [_Keys(f"{path}, [[network]]", (level,), assumed) for level in tables.get("network", [])]
        if not levels:
            raise Refusal(f"{path} has no [[network]]; give one inside a node, and one between nodes")
        inside, between = (level.number("gbytes_per_second") for level in (levels[0], levels[-1]))
        per_node = levels[0].number("devices", 8)
    return Device(keys.number("flops") * 1e12, keys.number("memory_gbps") * 1e9, inside * 1e9, between * 1e9, per_node)


def stated(tables: Mapping[str, Any], rows: Iterable[Row]) -> list[tuple[str, float, float]]:
    """What a file's [[memory]] states of its models, in bytes, and what the rows' own lists say of it."""
    found = []
    for table in tables.get("memory", []):
        for row in rows:
            if row.name.split()[0] != table.get("name"):
                continue
            work, layout = row.work, row.layout
            of_blocks = 18 * work.num_layers * work.layer.parameters / layout.pp
            waiting = float(megatron.waiting_layers(work, layout, 0))
            kinds = {"parameters_and_optimizer_gib": of_blocks}
            if layout.sequence_split:
                kinds["activations_selective_and_sequence_parallel_gib"] = waiting * work.layer.kept["attention"]
            else:
                kinds["activations_no_recompute_gib"] = waiting * work.layer.kept["none"]
            found += [
                (f"{row.name}, {kind[:-4]}", table[kind] * 2**30, said) for kind, said in kinds.items() if kind in table
            ]
    return found
