"""Cuts a user's module into pipeline stages, without a line of pipelines in it.

torch.fx records the order in which the module calls its parts, and never looks into the parts: they stay the modules
that they were, so that dropout still knows training from validation, and any batch size runs. Values that a later stage
needs travel through the stages between. (torch.export, on which torch's own tracer rests, freezes both.)
"""

import inspect
import itertools
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from torchtitan.models.balance import balance
from torchtitan.models.own import Inputs
from torchtitan.models.spec import Part
from torchtitan.own_model.derive import in_order
from torchtitan.refusal import Refusal


class _Recorder(fx.Tracer):
    proxy_buffer_attributes = True  # else what forward does to buffers alone happens once, while it is recorded

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        self._parts = {part.name for part in parts}
        self._contexts = _contexts()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _contexts() != self._contexts:  # a graph does not hold them
            raise ValueError("no_grad or autocast between layers")
        return super().create_node(*args, **kwargs)

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return name in self._parts or super().is_leaf_module(module, name)


def _contexts() -> tuple[Any, ...]:
    kinds = ("cpu", "cuda")
    return torch.is_grad_enabled(), *((torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)


def record(model: nn.Module, parts: Sequence[Part], inputs: Inputs) -> fx.Graph:
    """What forward does between the parts. Arguments that the data does not give keep their defaults."""
    arguments = inspect.signature(model.forward).parameters
    fixed = {name: argument.default for name, argument in arguments.items() if name not in inputs.names}
    try:
        graph = _Recorder(parts).trace(model, fixed)
    except Exception as error:
        raise Refusal(
            f"the model cannot be cut into pipeline stages: its forward does more between its layers than torch.fx can "
            f"follow ({type(error).__name__}: {error}); move what depends on values into a layer, or use "
            "parallelism.pipeline_parallel_degree = 1"
        ) from error
    checks: dict[fx.Node, None] = {}  # fx leaves a comparison of each fixed argument with its value
    for node in graph.nodes:
        is_fixed = node.op == "placeholder" and str(node.target) not in inputs.names
        if is_fixed or any(used in checks for used in node.all_input_nodes):
            checks[node] = None
    for node in reversed(checks):
        graph.erase_node(node)
    return graph


def divide(
    parts: Sequence[Part], graph: fx.Graph, num_stages: int, counts: Sequence[int] | None = None
) -> list[list[Part]]:
    """The parts of each stage, in the order of their calls: so many, or so that the slowest is as fast as possible."""
    by_name = {part.name: part for part in parts}
    called = [str(node.target) for node in graph.nodes if node.op == "call_module" and node.target in by_name]
    if repeated := [name for name in called if called.count(name) > 1]:
        raise Refusal(
            f"the model calls {repeated[0]} more than once, so it cannot be cut into pipeline stages around it; use "
            "parallelism.pipeline_parallel_degree = 1"
        )
    if len(called) < num_stages:
        raise Refusal(
            f"parallelism makes {num_stages} pipeline stages, but the model calls only {len(called)} parts "
            f"with parameters ({', '.join(called)}); use fewer stages, or give the ModelSpec layers = the list's name"
        )
    if counts is None:
        sizes = [len(stage) for stage in balance([by_name[name] for name in called], num_stages) or []]
    elif sum(counts) != len(called) or len(counts) != num_stages or 0 in counts:
        raise Refusal(
            f"parallelism.pipeline_parallel_layer_counts = {list(counts)} does not divide the {len(called)} parts "
            f"{', '.join(called)} among {num_stages} stages; say how many of them each stage has, none of them 0"
        )
    else:
        sizes = list(counts)
    ends = itertools.accumulate(sizes, initial=0)
    return [[by_name[name] for name in called[begin:end]] for begin, end in itertools.pairwise(ends)]


class Cut:
    """One way of forward (training or validation), divided among stages."""

    def __init__(self, graph: fx.Graph, begins: Sequence[str], constant: Collection[str] = ()) -> None:
        """`begins`: the part with which each stage begins. Each stage may have its own copy of a constant buffer."""
        self.nodes = [node for node in graph.nodes if node.op != "output"]
        (self.output,) = (node for node in graph.nodes if node.op == "output")
        self.num_stages = len(begins)
        place, self.stage = 0, {}
        for node in self.nodes:
            if node.op == "call_module" and node.target in begins[1:]:
                place = begins.index(node.target)
            self.stage[node] = place
        self.homes: dict[fx.Node, set[int]] = {}  # a parameter or buffer of the model itself lives where it is used
        for node in self.nodes:
            if node.op == "get_attr":
                users = {self._stage_of_user(user) for user in node.users} or {len(begins) - 1}
                if len(users) > 1 and node.target not in constant:
                    raise Refusal(
                        f"{node.target} is used on both sides of a cut, in stages {sorted(users)}; use it in one "
                        "place, or use parallelism.pipeline_parallel_degree = 1"
                    )
                self.homes[node] = users
        self.last_use = {
            node: max((self._stage_of_user(user) for user in node.users), default=self.stage[node])
            for node in self.nodes
        }

    def _stage_of_user(self, user: fx.Node) -> int:
        return self.num_stages - 1 if user is self.output else self.stage[user]

    def arriving(self, stage: int) -> list[fx.Node]:
        """The values that come in from the stage before."""
        if stage == 0:
            return [node for node in self.nodes if node.op == "placeholder"]
        return [n for n in self.nodes if n.op != "get_attr" and self.stage[n] < stage <= self.last_use[n]]

    def _is_in(self, node: fx.Node, stage: int) -> bool:
        return stage in self.homes.get(node, {self.stage[node]})

    def targets(self, stage: int) -> set[str]:
        """What the stage uses of the model."""
        return {str(n.target) for n in self.nodes if n.op in ("call_module", "get_attr") and self._is_in(n, stage)}

    def graph(self, stage: int) -> fx.Graph:
        """What the stage computes: from the values that arrive to a tuple of those that leave."""
        graph, values = fx.Graph(), {}
        for number, node in enumerate(self.arriving(stage)):
            values[node] = graph.placeholder(f"value_{number}")
        for node in self.nodes:
            if self._is_in(node, stage) and node.op != "placeholder":
                values[node] = graph.node_copy(node, values.__getitem__)
        is_last = stage == self.num_stages - 1
        leaving = tree_flatten(self.output.args[0])[0] if is_last else self.arriving(stage + 1)
        graph.output(tuple(values[node] for node in leaving))
        return graph


def become_stage(model: nn.Module, ways: Mapping[bool, Cut], stage: int) -> Any:
    """Turn the whole model into one of its stages. Returns how the last stage's tensors make up the model's output."""
    code = {training: type(fx.GraphModule(model, cut.graph(stage))).forward for training, cut in ways.items()}
    kept = ways[True].targets(stage) | ways[False].targets(stage)
    for number in range(ways[True].num_stages):
        for target in (ways[True].targets(number) | ways[False].targets(number)) - kept:
            owner, _, leaf = target.rpartition(".")
            holder = model.get_submodule(owner)
            for held in (holder._modules, holder._parameters, holder._buffers):
                if leaf in held:
                    held[leaf] = None

    def forward(self: nn.Module, *values: Any) -> Any:
        return code[self.training](self, *values)

    model.forward = types.MethodType(forward, model)
    return tree_flatten(ways[True].output.args[0])[1]


class _Shapes(fx.Interpreter):
    """Runs on the meta device, and keeps every value."""

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        super().__init__(model, graph=graph)
        self.seen: dict[fx.Node, Any] = {}

    def run_node(self, node: fx.Node) -> Any:
        self.seen[node] = super().run_node(node)
        return self.seen[node]


def shapes(
    model: nn.Module, graph: fx.Graph, cut: Cut, inputs: Any, names: Sequence[str], size: int
) -> list[list[torch.Tensor]]:
    """What arrives at each stage for `size` samples, and after the last what it returns, on the meta device.

    The model has the type it computes in.
    """
    dtype = next(model.parameters()).dtype

    def sized(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        kind = dtype if value.is_floating_point() else value.dtype
        return torch.empty(size, *value.shape[1:], dtype=kind, device="meta")

    run = _Shapes(model, graph)
    run.run(*in_order(tree_map(sized, inputs), names))
    ends, _ = tree_flatten(cut.output.args[0])
    return [[run.seen[n] for n in nodes] for nodes in (*map(cut.arriving, range(cut.num_stages)), ends)]


def assemble(leaves: Any, spec: Any) -> Any:
    """The model's output, of what the last stage returned."""
    return tree_unflatten([leaves] if isinstance(leaves, torch.Tensor) else list(leaves), spec)
