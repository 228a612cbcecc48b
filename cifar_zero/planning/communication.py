"""The bytes that a rank sends to other ranks in an optimizer step under each strategy; no torch.

Rajbhandari et al. 2020, "ZeRO", section 7: an all-reduce is a reduce-scatter and an all-gather, in each of which a rank
of N sends (N - 1)/N of the numbers. So ZeRO 0, 1 and 2 send two numbers per parameter, and ZeRO 3 three. DeepSpeed
0.19.8 and torch 2.15 differ from this in places, and the formulas follow them (measured in docs/planning.md).
Activation checkpointing gathers nothing more: the backward pass needs a recomputed block at once.
"""

from collections.abc import Callable

from cifar_zero.config.run import Run
from cifar_zero.planning.model_states import FLOAT32, PERSISTENT_ELEMENTS, Weight, parameter_size
from cifar_zero.planning.network import Network
from cifar_zero.planning.overheads import REUSE_ELEMENTS


def sent_bytes(run: Run, network: Network) -> int:
    """Returns the bytes of one rank and optimizer step, under a strategy that spreads images over all ranks.

    Not counted: the tokens that a mixture of experts sends to the ranks of its experts, and messages of a few numbers
    (losses, norms, batch statistics).
    """
    config, spec = run.config, run.spec
    ranks, micro_batches = run.world_size, config.accumulate
    size = parameter_size(spec, config.precision)
    trained = _sent(network, ranks, lambda weight: weight.trained)
    scattered = trained * (2 if run.on_cpu else 1)  # gloo runs a reduce-scatter as an all-reduce
    if spec.family == "fsdp2":
        # Gathered in the compute format, reduced in float32 if the precision is mixed (strategies/fsdp2.py).
        gathered = FLOAT32 if config.precision == "32-true" else 2
        reduced = 2 if config.precision == "bf16-true" else FLOAT32
        # A model without blocks is gathered once for both passes (reshard_after_forward of the root).
        gathers = 1 if network.largest_block == network.elements else 2
        whole = _sent(network, ranks, lambda weight: True)
        return round(micro_batches * (gathers * whole * gathered + scattered * reduced))
    if spec.stage == 3:
        persistent = _sent(network, ranks, lambda weight: weight.elements <= PERSISTENT_ELEMENTS)
        sharded = _sent(network, ranks, lambda weight: weight.elements > PERSISTENT_ELEMENTS)
        # Kept whole: gathered once in a step, after their update. Other parameters stay gathered if their next use is
        # near: except in very large models the backward pass finds what the forward pass has gathered.
        kept = min(1.0, REUSE_ELEMENTS // 2 / network.elements)
        return round((persistent + micro_batches * ((2 - kept) * sharded + scattered)) * size)
    # Stages 1 and 2 all-reduce a bucket over all ranks, of which each then keeps its part
    # (use_multi_rank_bucket_allreduce in zero/config.py), and gather the updated weights: three numbers, not two. Stage
    # 1 reduces once in a step, stage 2 with every micro-batch (allreduce_gradients in engine.py).
    all_reduces = micro_batches if spec.stage == 2 else 1
    gathers = 1 if spec.stage else 0
    return round((2 * all_reduces + gathers) * trained * size)


def _sent(network: Network, ranks: int, chosen: Callable[[Weight], bool]) -> float:
    """Returns the elements that a rank sends when the chosen weights are scattered, or gathered, once.

    An expert's weights are sent only to the ranks that have the same experts.
    """

    def share(weight: Weight) -> float:
        others = max(1, ranks // weight.ranks_that_share)
        return weight.elements / weight.ranks_that_share * (others - 1) / others

    return sum(share(weight) for weight in network.weights if chosen(weight))
