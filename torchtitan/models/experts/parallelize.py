"""How tensor-parallel ranks share a decoder with experts: attention as ever, the experts' tokens by position."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from torchtitan.models.decoder.parallelize import tensor_plan as plan_of_decoder
from torchtitan.models.experts.args import ExpertArgs
from torchtitan.models.mixture import MixtureOfExperts


def tensor_plan(args: ExpertArgs, split_sequence: bool, loss_parallel: bool) -> dict[str, ParallelStyle]:
    """Styles by module. The experts divide over their own axis (experts/divide.py); all ranks have the router."""
    plan = plan_of_decoder(args, split_sequence, loss_parallel)
    network = {name: style for name, style in plan.items() if ".feed_forward" in name}
    plan = {name: style for name, style in plan.items() if name not in network}
    sequence = Shard(1) if split_sequence else Replicate()
    for layer in range(args.n_layers):
        own = f"layers.{layer}.feed_forward"
        if args.is_dense(layer):
            plan |= {name.replace("layers.*.feed_forward", own): style for name, style in network.items()}
            continue
        if split_sequence:  # in generation each rank has all tokens (experts/divide.py)
            plan[own] = OwnTokens()
        if args.num_shared_experts:
            own += ".shared"
            plan[own] = PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(Replicate(),))
            plan |= {f"{own}.{name}": ColwiseParallel() for name in ("w1", "w3")}
            plan[f"{own}.w2"] = RowwiseParallel(output_layouts=sequence)
    return plan


class OwnTokens(ParallelStyle):
    """A mixture takes this rank's positions. All ranks have the router whole, and its gradients are summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, MixtureOfExperts)
        for name, weight in list(module.router.named_parameters()):
            whole = distribute_tensor(weight.detach(), device_mesh, [Replicate()])
            setattr(module.router, name, nn.Parameter(whole, requires_grad=weight.requires_grad))
            getattr(module.router, name).is_kept_whole = getattr(weight, "is_kept_whole", False)
        module.register_forward_pre_hook(_take_own)
        return module


def _take_own(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
    (x,) = inputs
    return (x.to_local() if isinstance(x, DTensor) else x,)
