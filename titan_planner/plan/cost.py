"""Seconds of operations on a device, and of a training step of a layout. Closed forms; a number may be an array.

What a prediction rests on is in two objects: the data sheet (`Device`), and efficiencies that can be fitted (`Rates`).
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torchtitan.models.operations import Attention, Block, Exchange, Number, Operation, Pass, Product, Work

_ALL = 2**30  # devices, more than there are: all are in one node


@dataclass(frozen=True)
class Device:
    """What data sheets say. Rates are a second's FLOPs and bytes; a link's are in one direction and of one device."""

    flops: float  # dense products in 16 bits
    memory_bandwidth: float
    inside: float  # the link to devices of the same node
    between: float  # the link to other nodes
    per_node: int = 8


@dataclass(frozen=True)
class Rates:
    """Which part of the data sheet is reached, and what else the data sheet does not say."""

    product: float = 0.75  # of the peak, for large products
    size: float = 384.0  # a product with this smallest side takes twice as long as its FLOPs say
    float8: float = 0.6  # of twice the peak
    attention: float = 0.3  # of the peak, for fused attention
    memory: float = 0.75  # of the bandwidth; 10 MB and more at once on an A100, Calculon's system files
    unfused: float = 2.5  # bytes that move without a compiler, of those that must move
    inside: float = 0.8  # of a node's links; nccl-tests show 230 to 240 of 300 GB/s on 8 A100s
    between: float = 0.9  # of the network
    overlap: float = 0.5  # part of tensor parallelism's collectives that asynchronous ones hide
    latency: float = 10e-6  # of a collective inside a node
    hop: float = 20e-6  # of a message between nodes
    layer: float = 2e-4  # of a layer and microbatch, whatever it computes
    optimizer: float = 28.0  # bytes a parameter that an update moves: AdamW's with moments in float32
    fsdp: float = 1.0  # FSDP's seconds inside a node, of a plain collective's: a CPU's ranks exchange by memory
    # What products lose, of the seconds of an exchange beside them. Four GPUs lose 18.9 % and are still 10.2 % faster
    # than one after the other (means over four kinds, arXiv 2507.03114): 0.189 / (1.189 * 1.102 - 1).
    shared: float = 0.6
    # What holds for GPUs is the default; a CPU's cores differ in all three (docs/planner/planner.md).
    exposed: float = 0.0  # part of FSDP's exchange that does not run beside products; on a CPU FSDP waits for all of it
    tensor: float = 0.0  # extra seconds of each collective of tensor or context parallelism; a GPU hides them
    alone: float = 1.0  # speed of a device while its pipeline's others wait; why a CPU needs more is not known


@dataclass(frozen=True)
class Layout:
    """Degrees, and what the run does with a global batch."""

    dp: Number = 1  # ranks that share the batch and the weights
    replicas: Number = 1  # of all these ranks
    tp: Number = 1
    pp: Number = 1
    cp: Number = 1
    ep: Number = 1  # ranks among dp, cp and tp that the experts are divided over
    microbatches: Number = 1  # of one pass of a rank through its stages; without a pipeline, of a step
    passes: Number = 1  # of a step, with a pipeline
    stages_per_rank: Number = 1
    recompute: str = "none"
    compiled: bool = True
    float8: bool = False
    async_tp: bool = False
    shards: bool = True  # the weights over dp
    regathers: Number = 1  # 1: backward gathers the weights once more; 0: they stayed
    most_layers: Number = 0  # of a pipeline rank, and of the last one; 0: all ranks have as many
    last_layers: Number = 0
    sequence_split: bool = True  # tensor parallelism splits the sequence between layers
    overlaps: bool = True  # the exchange of weights and gradients runs beside products
    splits_optimizer: bool = False  # over dp, where the weights are whole
    stops_early: bool = False  # a recompute stops once backward has all that it needs
    sends_beside: bool | np.ndarray = False  # messages between stages run beside products
    wide: float = 1.0  # bytes of an activation or gathered weight, of those of 16 bits
    states: float = 8.0  # bytes a parameter that the optimizer keeps: AdamW's moments in float32

    @property
    def expert_shards(self) -> Number:
        """Ranks of a replica that have the same experts."""
        return self.dp * self.cp * self.tp / self.ep


@dataclass(frozen=True)
class Seconds:
    """A step as a tree: each name is a part of the whole."""

    parts: dict[str, Any]

    @property
    def total(self) -> Number:
        return sum(part.total if isinstance(part, Seconds) else part for part in self.parts.values())


@dataclass(frozen=True)
class Machine:
    """Seconds of single operations."""

    device: Device
    rates: Rates

    def seconds(self, operation: Operation, layout: Layout) -> tuple[Number, Number, Number]:
        """Forward, backward, and what backward computes once more."""
        forward, backward = self._seconds(operation, layout)
        mode, half = layout.recompute, layout.recompute == "every second layer"
        part = operation.again.get(mode, 1.0 if half or mode == "full" else 0.0) * (0.5 if half else 1.0)
        return forward, backward, forward * part * (operation.again.get("stopped", 1.0) if layout.stops_early else 1.0)

    def _seconds(self, operation: Operation, layout: Layout) -> tuple[Number, Number]:
        device, rates = self.device, self.rates
        if isinstance(operation, Product):
            is_float8 = operation.in_float8 and layout.float8
            flops = device.flops * (2 * rates.float8 if is_float8 else rates.product)
            smallest = np.minimum(np.minimum(operation.rows, operation.columns), operation.inner)
            work = 2.0 * operation.rows * operation.columns * operation.inner * operation.count
            seconds = work / flops * (1 + (2 if is_float8 else 1) * rates.size / smallest)
            if is_float8:  # the activation is read, and written once more in 8 bits
                seconds = seconds + self.moving(3 * operation.rows * operation.inner)
            return seconds, 2 * seconds
        if isinstance(operation, Attention):
            seconds = operation.flops / (device.flops * rates.attention)
            return seconds, 2.5 * seconds  # five products in backward, two in forward
        if isinstance(operation, Pass):
            more = layout.wide * (1.0 if layout.compiled else rates.unfused) if operation.fuses else 1.0
            return self.moving(operation.forward * more), self.moving(operation.backward * more)
        assert isinstance(operation, Exchange)
        if operation.axis == "ep":
            one = self.all_to_all(layout.wide * operation.bytes, layout.ep)
            return one * operation.count, one * operation.back
        size = layout.tp if operation.axis == "tp" else layout.cp
        one = self.collective(layout.wide * operation.bytes, size, layout.tp if operation.axis == "cp" else 1)
        one = one * (2 if operation.kind == "all-reduce" else 1)
        one = one + np.where(np.asarray(size) > 1, rates.tensor, 0.0)
        if operation.axis == "tp" and layout.async_tp:
            one = one * (1 - rates.overlap)
        return one * operation.count, one * operation.back

    def moving(self, size: Number) -> Number:
        return size / (self.device.memory_bandwidth * self.rates.memory)

    def updating(self, parameters: Number, states: Number) -> Number:
        """An update reads weight, gradient and states, and writes all but the gradient."""
        return self.moving(parameters * self.rates.optimizer * (12 + 2 * states) / 28)

    def collective(self, size: Number, ranks: Number, stride: Number = 1) -> Number:
        """A gather or scatter of a tensor over `ranks` devices that lie `stride` apart.

        Across nodes, the members in a node share all of its links: `stride` of them are other groups' at that moment.
        """
        device, rates = self.device, self.rates
        members = np.minimum(ranks, np.maximum(1, device.per_node // np.maximum(1, stride)))  # of a node
        within = device.inside * rates.inside
        across = np.minimum(within, device.between * members * rates.between)
        rate = np.where(np.asarray(ranks) * stride > device.per_node, across, within)
        nodes = np.maximum(1, ranks // members)  # a ring passes through each
        delay = rates.latency + rates.hop * (nodes - 1)
        return np.where(np.asarray(ranks) > 1, (ranks - 1) / ranks * size / rate + delay, 0.0)

    def all_to_all(self, size: Number, ranks: Number) -> Number:
        """Each of `ranks` neighbours sends every other one its part of so many bytes, over its own links."""
        device, rates = self.device, self.rates
        near = np.minimum(ranks, device.per_node) / ranks  # of the bytes, for its node and itself
        inside = size * (near - 1 / ranks) / (device.inside * rates.inside)
        across = size * (1 - near) / (device.between * rates.between)
        delay = np.where(near < 1, rates.hop, rates.latency)
        return np.where(np.asarray(ranks) > 1, np.maximum(inside, across) + delay, 0.0)

    def block(self, block: Block, layout: Layout) -> tuple[Number, Number]:
        """Forward, and backward with what it computes once more."""
        each = [self.seconds(operation, layout) for operation in block.operations]
        return sum(forward for forward, _, _ in each), sum(backward + again for _, backward, again in each)

    def exchange(self, parameters: Number, layout: Layout, experts: Number = 0) -> tuple[Number, Number]:
        """Gather weights in 16 bits over the ranks that shard them; scatter gradients in 32, and sum over replicas."""
        if np.any(experts):
            gather, scatter = self.exchange(parameters, layout)
            more, less = self.exchange(experts, replace(layout, dp=layout.expert_shards, cp=1, tp=layout.ep))
            return gather + more, scatter + less
        group = layout.dp * layout.cp
        near = np.where(group * layout.tp <= self.device.per_node, self.rates.fsdp, 1.0)
        gather = near * self.collective(2 * layout.wide * parameters, group, layout.tp)
        scatter = near * self.collective(4 * parameters, group, layout.tp)
        return gather, scatter + 2 * self.collective(4 * parameters / group, layout.replicas, group * layout.tp)

    def beside(
        self,
        forward: Number,
        backward: Number,
        parameters: Number,
        layout: Layout,
        regathers: Number,
        experts: Number = 0,
    ) -> Number:
        """Both, while weights are gathered beside forward, and gradients scattered beside backward.

        The bytes that pass through a device slow its products, by as much as within a node, however slow the network.
        """
        gather, scatter = self.exchange(parameters, layout, experts)
        near = replace(self, device=replace(self.device, per_node=_ALL))
        half, whole = near.exchange(parameters, layout, experts)

        def both(computed: Number, exchanged: Number, inside: Number) -> Number:
            longer = np.maximum(computed + self.rates.shared * inside, exchanged)
            return longer + self.rates.exposed * np.minimum(computed, exchanged)

        return both(forward, gather, half) + both(backward, regathers * gather + scatter, regathers * half + whole)


def step(machine: Machine, work: Work, layout: Layout) -> Seconds:
    """One optimizer step. With a pipeline, 1F1B or its interleaved form.

    Without a pipeline, FSDP gathers and scatters each layer beside the layer before. With one, weights are gathered
    once a pass, and stay.
    """
    rates, device = machine.rates, machine.device
    forward, backward = machine.block(work.layer, layout)
    forward, backward = forward + rates.layer, backward + rates.layer
    of_ends = machine.block(work.ends, replace(layout, recompute="none"))  # the output layer is not recomputed
    ends: Number = sum(of_ends)
    group, piped = layout.dp * layout.cp, np.asarray(layout.pp) > 1
    even = work.num_layers / layout.pp
    per_rank = np.where(layout.most_layers, layout.most_layers, even)
    of_last = np.where(layout.most_layers, layout.last_layers, even)
    of_layer: Number = forward + backward
    if layout.shards:
        if not piped.all():
            layer = work.layer
            alone = machine.beside(forward, backward, layer.parameters, layout, layout.regathers, layer.experts)
            of_layer = np.where(piped, of_layer, alone)
            ends = np.where(piped, ends, machine.beside(*of_ends, work.ends.parameters, layout, 0.0))
        own: Number = sum(machine.exchange(work.layer.parameters, layout, work.layer.experts))
        first, last = (sum(machine.exchange(size, layout)) for size in (work.lookup, work.ends.parameters))
        longest = np.maximum(per_rank * own + first, of_last * own + last)
        # Nothing runs beside the gather of the table that looks tokens up, the first, and its scatter, the last.
        once: Number = np.where(piped, longest, np.where(work.is_tied, 0.0, layout.microbatches * first))
    else:  # a step gathers whole weights beside its first forward, and scatters gradients beside its last backward
        own, experts = work.num_parameters / layout.pp, even * work.layer.experts
        both = machine.beside(per_rank * forward, per_rank * backward, own, layout, 0.0, experts)
        once = both - per_rank * of_layer if layout.overlaps else sum(machine.exchange(own, layout, experts))
    each, beyond = per_rank * of_layer, np.maximum(0, ends - (per_rank - of_last) * of_layer)
    near = group * layout.replicas * layout.tp < device.per_node  # the next stage is in the same node
    link = np.where(near, device.inside * rates.inside, device.between * rates.between)
    sent, count = layout.wide * work.sent / link, layout.stages_per_rank * layout.microbatches
    hop = sent + np.where(near, rates.latency, rates.hop)
    # Beside products, only the first microbatch's way there and the last one's way back show, and a full link.
    shown = np.maximum(
        2 * (layout.pp * layout.stages_per_rank - 1) * hop, 2 * count * sent - each * layout.microbatches
    )
    messages = np.where(layout.sends_beside, shown, 4 * count * hop)
    runs = np.where(piped, layout.passes, 1)
    splits = layout.shards or layout.splits_optimizer
    held = work.num_parameters / layout.pp / (group if splits else 1)
    held = held + even * work.layer.experts / (layout.expert_shards if splits else 1)
    return Seconds(
        {
            "layers": each * layout.microbatches * runs,
            "output layer and loss": beyond / np.where(piped, rates.alone, 1.0) * layout.microbatches * runs,
            "pipeline filling and draining": np.where(piped, (layout.pp - 1) / layout.stages_per_rank * each, 0.0)
            / rates.alone
            * runs,
            "messages between stages": np.where(piped, messages, 0.0) * runs,
            "weights and gradients, not hidden": once * (runs if layout.shards else 1),
            "optimizer": machine.updating(held, layout.states),
        }
    )
