"""Expert parallelism: distributes the experts of a model over ranks with DeepSpeed's own layer. An all-to-all sends
tokens to the experts and back. DeepSpeed 0.19.8 needs its own layer in the model, the experts in separate parameter
groups, and ZeRO 0, 1 or 2."""

from collections.abc import Iterable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import Tensor, nn

from cifar_zero.checkpoints.zero_folder import plain_names
from cifar_zero.models.moe import Gate, MixtureOfExperts


class DistributedGate(Gate):
    """The plain gate with the interface of DeepSpeed's gate. Unlike DeepSpeed's gate, it has no random second choice in
    an evaluation and drops no random tokens there, and a training step does not wait for the device to return the
    capacity."""

    def __init__(self, gate: Gate):
        super().__init__(gate.wg.in_features, gate.num_experts, gate.options)
        self.wg = gate.wg
        self._group: Any = None

    def _set_ep_group(self, group: Any) -> None:
        self._group = group

    def forward(self, tokens: Tensor, *unused: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the gate's routing (`models.moe.Routing`) and number of experts as a tuple, in the order that
        DeepSpeed's MoE layer expects."""
        to = super().forward(tokens)
        return to.load_balance_loss, to.capacity, self.num_experts, to.experts, to.slots, to.weights, to.tokens

    def _largest(self, count: Tensor) -> int:
        if self.options.ep_size > 1:
            torch.distributed.all_reduce(count, torch.distributed.ReduceOp.MAX, group=self._group)
        return super()._largest(count)


class DistributedMixture(MoE):
    """DeepSpeed's MoE layer with the modules of a plain mixture of experts and this rank's share of its experts."""

    def __init__(self, mixture: MixtureOfExperts, rank: int):
        options, experts = mixture.options, mixture.experts
        super().__init__(
            mixture.gate.wg.in_features,
            experts[0],
            num_experts=len(experts),
            ep_size=options.ep_size,
            k=options.top_k,
            use_residual=options.mlp_type == "residual",
        )
        self.deepspeed_moe.gate = DistributedGate(mixture.gate)
        first = rank % options.ep_size * self.num_local_experts
        local: Any = self.deepspeed_moe.experts.deepspeed_experts
        for number, own in enumerate(local):
            own.load_state_dict(experts[first + number].state_dict())
        if self.use_residual:
            self.mlp, self.coefficient = mixture.mlp, mixture.coefficient

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Makes the process groups without the line that DeepSpeed prints for each of them."""
        with redirect_stdout(StringIO()):
            super().set_deepspeed_parallelism(use_data_before_expert_parallel_)

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns what the plain mixture of experts would return for the same tokens."""
        gate: Any = self.deepspeed_moe.gate
        return gate.run(self._forward, x)

    def _forward(self, x: Tensor) -> Tensor:
        try:
            output, _, _ = super().forward(x)
        finally:
            # The gate keeps the loss. If it were kept here, it would hold all activations of a block that activation
            # checkpointing recomputes, because the recomputation stops with an exception at the last activation.
            self.deepspeed_moe.l_aux = None
        return output


def distribute(model: nn.Module, rank: int) -> None:
    """Replaces each plain mixture of experts in a model, in place, with DeepSpeed's MoE layer, which keeps only this
    rank's share of the experts. `rank` is the rank's index among all ranks."""
    for parent in [*model.modules()]:
        for name, child in parent.named_children():
            if isinstance(child, MixtureOfExperts):
                setattr(parent, name, DistributedMixture(child, rank))


def ep_size(model: nn.Module) -> int:
    """Returns the number of ranks over which the experts of a mixture are distributed, or 1 if the model has no
    mixture."""
    return next((module.ep_size for module in model.modules() if isinstance(module, MoE)), 1)


def split_groups(model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the given parameter groups of an optimizer, split so that DeepSpeed reduces the gradients of experts only
    over the ranks that have the same experts."""
    if not any(isinstance(module, MoE) for module in model.modules()):
        return groups
    dense = [{**group, "name": f"dense {number}"} for number, group in enumerate(groups)]
    split = split_params_into_different_moe_groups_for_optimizer(dense)
    names = {parameter: name for name, parameter in model.named_parameters()}
    kept: list[dict[str, Any]] = []
    for group in split:
        if group["params"]:
            kept.append({**group, "param_names": [names[parameter] for parameter in group["params"]]})
    return kept


def plain_names_of(engine: Any, names: Iterable[str]) -> dict[str, str]:
    """Maps the name of each weight on this rank to its name in the plain model. The rank may have only some of all
    experts."""
    return plain_names(names, engine.global_rank % ep_size(engine.module))


def names_of_parameters(engine: Any) -> dict[nn.Parameter, str]:
    """Maps each parameter on this rank to its name in the plain model."""
    own = dict(engine.module.named_parameters())
    plain = plain_names_of(engine, own)
    return {parameter: plain[name] for name, parameter in own.items()}
