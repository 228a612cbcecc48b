"""Implements mixtures of experts in plain torch: a gate sends each token to one or two of several experts of the same
shape.

The maths is that of DeepSpeed's layer (deepspeed/moe/sharded_moe.py, 0.19.8; GShard, Lepikhin et al. 2020; Switch
Transformer, Fedus et al. 2021). Every strategy uses this gate. The layer in this file has all experts on one device,
and strategies/deepspeed/experts.py distributes them over ranks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cifar_zero.models import MixtureOptions

JITTER = 0.01
"""Jitter multiplies the gate's input by random numbers from 1 - JITTER to 1 + JITTER, as in DeepSpeed and Switch
Transformer."""


@dataclass(frozen=True)
class Routing:
    """The routing of S tokens to E experts in one forward pass, with k experts for each token."""

    experts: Tensor  # int64 (k, S), each token's experts, the most probable first; -1 where the token was dropped
    slots: Tensor  # int64 (k, S), index of each token's place in its expert; without meaning where it was dropped
    weights: Tensor  # float32 (k, S), weights of the experts' outputs; 0 where the token was dropped
    capacity: int  # number of places of each expert
    tokens: Tensor  # int64 (E,), tokens that each expert receives
    probabilities: Tensor  # float32 (S, E), the gate's probabilities, detached
    load_balance_loss: Tensor  # float32 scalar, 1 if the load is even, up to E if one expert receives all tokens


class Gate(nn.Module):
    """Chooses the experts of each token, in float32 whatever the precision of the model, or in float64 for float64
    tokens.

    In training, tokens beyond an expert's capacity are dropped: random ones with one expert per token. With two, the
    last of the batch are dropped, second choices first. In evaluation nothing is random, and by default nothing is
    dropped, so that an image's scores do not depend on the other images of its batch.
    """

    routing: Routing | None = None  # routing of the last forward pass, for the loss and the metrics

    def __init__(self, hidden_size: int, num_experts: int, options: MixtureOptions):
        super().__init__()
        self.wg = nn.Linear(hidden_size, num_experts, bias=False)
        self.num_experts = num_experts
        self.options = options

    def forward(self, tokens: Tensor) -> Routing:
        """Returns the routing of tokens (S, hidden_size), and keeps it in `routing`."""
        with torch.autocast("cuda" if tokens.is_cuda else "cpu", enabled=False):
            if tokens.dtype != torch.float64:
                tokens = tokens.float()
            if self.training and self.options.noisy_gate_policy == "Jitter":
                tokens = tokens * torch.empty_like(tokens).uniform_(1 - JITTER, 1 + JITTER)
            logits = F.linear(tokens, self.wg.weight.to(tokens.dtype))
            self.routing = self._route(logits)
        return self.routing

    def _route(self, logits: Tensor) -> Routing:
        probabilities = logits.softmax(dim=1)
        choices = self._choices(logits)
        masks = F.one_hot(choices, self.num_experts)  # (k, S, E)
        load_balance_loss = self.num_experts * (probabilities.mean(0) * masks[0].float().mean(0)).sum()
        capacity = self._capacity(masks)
        if self.training and self.options.top_k == 1 and capacity < len(logits):
            drawn = torch.rand(masks[0].shape, device=masks.device) * masks[0]  # DeepSpeed's random token selection
            masks = masks * torch.zeros_like(masks[0]).scatter(0, drawn.topk(capacity, dim=0).indices, 1)
        slots = ((masks.flatten(0, 1).cumsum(0) - 1).view_as(masks) * masks).sum(-1)  # first choices come first
        kept = masks.any(-1) & (slots < capacity)
        weights = probabilities.gather(1, choices.T).T * kept
        if self.options.top_k > 1:
            weights = weights / weights.sum(0).clamp(min=torch.finfo(weights.dtype).eps)
        return Routing(
            experts=torch.where(kept, choices, -1),
            slots=slots,
            weights=weights,
            capacity=capacity,
            tokens=(masks * kept[..., None]).sum((0, 1)),
            probabilities=probabilities.detach(),
            load_balance_loss=load_balance_loss,
        )

    def _choices(self, logits: Tensor) -> Tensor:
        """Returns the experts of each token, int64 (k, S), given the gate's logits (S, E). The first expert is the most
        probable one, and with top_k 2 the second expert is the next most probable one. In training, the second expert
        is drawn by Gumbel's trick instead, as in DeepSpeed. In training with RSample (top_k 1), the only expert is
        drawn so."""
        noisy = logits
        if self.training and (self.options.noisy_gate_policy == "RSample" or self.options.top_k == 2):
            noisy = logits + gumbel(logits)
        if self.options.top_k == 1:
            return noisy.argmax(dim=1)[None]
        first = logits.argmax(dim=1)
        return torch.stack([first, noisy.scatter(1, first[:, None], -math.inf).argmax(dim=1)])

    def _capacity(self, masks: Tensor) -> int:
        """Returns the number of tokens that each expert has places for. With a capacity factor, as always in training,
        it is computed from the shapes of `masks` (k, S, E) alone, without waiting for the device. Without a factor, it
        is the largest number of tokens that an expert receives, or all tokens in an exported program."""
        routes, tokens, experts = masks.shape
        factor = self.options.eval_capacity_factor
        if self.training:
            factor = self.options.capacity_factor
        if factor:
            # Rounds up, but not if only rounding error in the factor exceeds a whole number.
            share = math.ceil(tokens * routes * factor / experts - 1e-6)
            return min(max(share, self.options.min_capacity, 1), tokens)
        if torch.compiler.is_exporting():  # an exported program cannot wait for a value
            return tokens
        return self._largest(masks.sum((0, 1)).max())

    def run(self, layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Returns the result of `layer`, the forward pass of the mixture of experts that has this gate, for x. If
        shapes in the layer depend on values, torch.compile leaves it out of its graphs, because each new shape would
        recompile it."""
        known = self.training or self.options.eval_capacity_factor > 0 or torch.compiler.is_exporting()
        if torch.compiler.is_compiling() and not known:
            disable: Any = torch.compiler.disable
            layer = disable(layer)
        return layer(x)

    def _largest(self, count: Tensor) -> int:
        """Returns `count`, the largest number of tokens that any expert receives (a scalar), as an int. A subclass
        overrides this method where ranks have to agree on the number."""
        return int(count)


class MixtureOfExperts(nn.Module):
    """A layer of experts on one device that maps tokens (..., hidden_size) to the same shape. The tokens of each expert
    are padded with zeros up to its capacity, so that every expert gets a gradient in each step. The experts start from
    different weights, whereas DeepSpeed starts all experts of a layer from the same ones."""

    def __init__(
        self, hidden_size: int, num_experts: int, make_expert: Callable[[], nn.Module], options: MixtureOptions
    ):
        super().__init__()
        self.options = options
        self.gate = Gate(hidden_size, num_experts, options)
        self.experts = nn.ModuleList(make_expert() for _ in range(num_experts))
        if options.mlp_type == "residual":
            self.mlp = make_expert()
            self.coefficient = nn.Linear(hidden_size, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the weighted sum of the outputs of each token's experts. A dropped choice adds zeros. With mlp_type
        residual, the result is the sum of this and of the dense layer's output, each with a learnt weight."""
        return self.gate.run(self._forward, x)

    def _forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        routing = self.gate(tokens)
        places = len(self.experts) * routing.capacity
        # Dropped tokens go to one additional place.
        to = torch.where(routing.experts < 0, places, routing.experts * routing.capacity + routing.slots)
        sent = tokens.new_zeros(places + 1, tokens.shape[1])
        sent = sent.index_copy(0, to.flatten(), tokens.repeat(len(to), 1))
        of_experts = sent[:-1].view(len(self.experts), routing.capacity, -1)
        outputs = torch.cat([expert(own) for expert, own in zip(self.experts, of_experts, strict=True)])
        outputs = torch.cat([outputs, outputs.new_zeros(1, outputs.shape[1])])
        mixed = (outputs[to] * routing.weights[..., None]).sum(0).to(outputs.dtype).view_as(x)
        if self.options.mlp_type != "residual":
            return mixed
        shares = self.coefficient(x).softmax(-1)
        return mixed * shares[..., :1] + self.mlp(x) * shares[..., 1:]


def gates(net: nn.Module) -> tuple[Gate, ...]:
    """Returns the gates of a model in the order of its layers, whether the experts are on one rank or on several."""
    return tuple(module for module in net.modules() if isinstance(module, Gate))


def gumbel(like: Tensor) -> Tensor:
    """Returns Gumbel noise in the shape of `like`. The argmax of logits plus this noise is distributed as the softmax
    of the logits."""
    return -torch.empty_like(like).exponential_().log()
