"""The bytes that a rank sends in an optimizer step under each strategy, and how long a link takes for them; no torch.

Rajbhandari et al. 2020, "ZeRO", section 7: an all-reduce is a reduce-scatter and an all-gather, in each of which a rank
of N sends (N - 1)/N of the numbers; so ZeRO 0, 1 and 2 send two for each parameter and ZeRO 3 three. What DeepSpeed
0.19.8 and torch 2.15 send is in places something else, and counted here as they do it (the bytes were counted on
a link: docs/planning.md):

- Stages 1 and 2 add a bucket up on all ranks, of which each then keeps its part (use_multi_rank_bucket_allreduce in
  zero/config.py, average_tensor in zero/stage_1_and_2.py), and gather the updated weights: three, not two. Stage 1
  reduces once in a step, stage 2 with every micro-batch (allreduce_gradients in engine.py).
- Stage 3 keeps a gathered parameter whose next use is near (`beside.REUSE_ELEMENTS`): of all but very large networks
  the backward pass finds the weights there that the forward pass has gathered, and two are sent, not three. Parameters
  that it keeps whole are gathered once in a step, after their update.
- FSDP2 gathers what belongs to no block once for both passes (reshard_after_forward of the root).
- gloo, which CPU ranks talk over, scatters a sum by an all-reduce (torch 2.15, reduce_scatter_tensor): two, not one.
- Activation checkpointing gathers nothing more: a block that is computed again is needed at once by its backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from config import Config
from planning.beside import PREFETCH_ELEMENTS, REUSE_ELEMENTS
from planning.model_states import FLOAT32, PERSISTENT_ELEMENTS, Weight, parameter_size
from planning.network import Network
from strategies import Spec
from strategies.deepspeed import BUCKET_ELEMENTS

DDP_BUCKET_BYTES = 25 * 2**20
"""bucket_cap_mb of DistributedDataParallel (torch 2.15), whose first bucket is smaller."""


@dataclass(frozen=True)
class Traffic:
    """Of one rank in one optimizer step, over the network."""

    sent_bytes: int
    collectives: int
    """Calls, each of which waits for the slowest rank; at least so many."""

    def seconds(self, bandwidth: float) -> float:
        """Returns how long a link of so many bytes per second takes for it, without the latency of each collective."""
        return self.sent_bytes / bandwidth


def traffic(spec: Spec, config: Config, network: Network) -> Traffic | None:
    """What a rank sends; None for a strategy that cuts layers, which has no formula.

    Not counted: the tokens that a mixture of experts sends to the ranks of its experts, and what is a few numbers
    (losses, norms, batch statistics).
    """
    if spec.one_replica:
        return None
    ranks, micro_batches = config.world_size, config.accumulate
    if ranks == 1:
        return Traffic(0, 0)
    size = parameter_size(spec, config.precision)
    trained = _sent(network, ranks, lambda weight: weight.trained)
    elements = network.trained
    if spec.family == "baseline":
        return Traffic(round(2 * trained * size), math.ceil(elements * size / DDP_BUCKET_BYTES))
    if spec.family == "fsdp2":
        return _of_fsdp2(config, network)
    if spec.stage == 3:
        return _of_stage_3(config, network, size)
    buckets = math.ceil(elements / BUCKET_ELEMENTS)
    reductions = micro_batches if spec.stage == 2 else 1
    gathers = 1 if spec.stage else 0
    return Traffic(round((2 * reductions + gathers) * trained * size), (reductions + gathers) * buckets)


def _of_stage_3(config: Config, network: Network, size: int) -> Traffic:
    ranks, micro_batches = config.world_size, config.accumulate
    persistent = _sent(network, ranks, lambda weight: weight.elements <= PERSISTENT_ELEMENTS)
    cut = _sent(network, ranks, lambda weight: weight.elements > PERSISTENT_ELEMENTS)
    kept = min(1.0, REUSE_ELEMENTS // 2 / network.elements)
    gathered = persistent + micro_batches * (2 - kept) * cut
    reduced = micro_batches * _scatter(config) * _sent(network, ranks, lambda weight: weight.trained)
    calls = math.ceil(network.elements / PREFETCH_ELEMENTS) + math.ceil(network.trained / BUCKET_ELEMENTS)
    return Traffic(round((gathered + reduced) * size), 1 + micro_batches * calls)


def _of_fsdp2(config: Config, network: Network) -> Traffic:
    """Gathered in the format of computing, reduced in float32 where that is mixed (strategies/fsdp2.py)."""
    ranks, micro_batches = config.world_size, config.accumulate
    gathered = FLOAT32 if config.precision == "32-true" else 2
    reduced = 2 if config.precision == "bf16-true" else FLOAT32
    whole = _sent(network, ranks, lambda weight: True)
    # Without blocks nothing is gathered twice; of a network of --parameters they are not known (largest_block is 0).
    in_blocks = whole if not network.largest_block else whole * sum(network.blocks) / network.elements
    trained = _scatter(config) * _sent(network, ranks, lambda weight: weight.trained)
    calls = 3 * len(network.blocks) + 2
    return Traffic(round(micro_batches * ((whole + in_blocks) * gathered + trained * reduced)), micro_batches * calls)


def _scatter(config: Config) -> int:
    """What is sent of each number where a sum is scattered, times (N - 1)/N."""
    return 2 if config.accelerator == "cpu" else 1


def _sent(network: Network, ranks: int, chosen: Callable[[Weight], bool]) -> float:
    """Numbers that a rank sends where all of these are scattered, or gathered, once.

    Those of an expert go to the ranks alone that have the same experts.
    """

    def share(weight: Weight) -> float:
        others = max(1, ranks // weight.ranks_that_share)
        return weight.elements / weight.ranks_that_share * (others - 1) / others

    return sum(share(weight) for weight in network.weights if chosen(weight))
