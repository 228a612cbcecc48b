"""Counts the collectives of an optimizer step under each strategy, and the bytes that each rank sends.

The formulas count gradients and parameters. They leave out experts, which have groups and messages of their own,
optimizers that communicate themselves (Muon), and messages of a few bytes, such as norms and losses. A strategy that
offloads sends the same bytes as without offloading. The sources are DeepSpeed 0.19.8 and torch 2.15.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cifar_zero.config.run import Run
from cifar_zero.planning import formulas
from cifar_zero.planning.formulas import FLOAT32, Network, parameter_size

STAGE_0_ELEMENTS = 500_000_000
"""Bucket size of stage 0, in elements (MEMORY_OPT_ALLREDUCE_SIZE in deepspeed/runtime/engine.py)."""

DDP_BYTES = 25 * 2**20
"""Bucket size of DDP, in bytes (bucket_cap_mb in torch/nn/parallel/distributed.py). The smaller size of its first
bucket, 1 MiB, is not taken into account."""


@dataclass(frozen=True)
class Traffic:
    """The collectives of an optimizer step, with the sizes of the whole tensors in bytes."""

    ranks: int
    all_reduced: int
    reduce_scattered: int
    all_gathered: int
    collectives: int  # number of calls

    @property
    def sent(self) -> int:
        """Bytes that each rank sends with ring algorithms, which divide a tensor into one part per rank. In a
        reduce-scatter or an all-gather, a rank sends all parts but one. An all-reduce consists of a reduce-scatter and
        an all-gather (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
        workstations")."""
        return (2 * self.all_reduced + self.reduce_scattered + self.all_gathered) * (self.ranks - 1) // self.ranks


def traffic(run: Run, network: Network) -> Traffic:
    """Returns the collectives of an optimizer step.

    - ddp reduces float32 gradients once (`no_sync` of torch/nn/parallel/distributed.py, while gradients accumulate).
    - Stage 0 reduces gradients in the model's format once (buffered_allreduce_fallback in runtime/engine.py).
    - Stages 1 and 2 all-reduce the gradients too, instead of a reduce-scatter, because the default of
      use_multi_rank_bucket_allreduce is true (average_tensor in zero/stage_1_and_2.py). Stage 1 all-reduces once, and
      stage 2 in each micro-batch (allreduce_gradients in runtime/engine.py). The updated parameters are gathered once
      (all_gather_into_tensor_dp_groups in runtime/utils.py).
    - Stage 3 gathers parameters in the forward and again in the backward pass of each micro-batch. Parameters that it
      keeps after the forward pass are not gathered again (`REUSE_ELEMENTS`; __params_to_release in
      zero/partitioned_param_coordinator.py). It reduce-scatters gradients in each micro-batch (__avg_scatter_grads in
      zero/stage3.py). Parameters that are whole on each rank are gathered one by one after the update (_post_step). The
      gathers are estimated for a model of more than REUSE_ELEMENTS / 2 elements. Prefetching may keep up to
      --zero.max_live_parameters elements, so that fewer bytes are gathered, and near that limit it gathers in smaller
      messages than --zero.prefetch_bucket_size.
    - fsdp2 gathers each block in the forward and again in the backward pass of each micro-batch, and the rest of the
      model once. It reduce-scatters the gradients in each micro-batch, in float32 under mixed precision
      (foreach_all_gather and foreach_reduce in torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
    """
    spec, placement = run.spec, run.placement
    times, ranks = placement.accumulate, placement.world_size
    size = parameter_size(spec, placement.precision)
    gradients = network.trained * size
    if spec.family == "fsdp2":
        gathered = network.elements + sum(network.blocks)
        gathered *= FLOAT32 if placement.precision == "32-true" else 2
        return Traffic(ranks, 0, times * gradients, times * gathered, times * (3 * len(network.blocks) + 2))
    trained = [weight.elements for weight in reversed(network.weights) if weight.trained]
    if spec.stage == 3:
        return _stage_3(run, network, trained)
    if spec.stage > 0:
        times = times if spec.stage == 2 else 1
        messages = times * _messages(trained, placement.zero.reduce_bucket_size)
        return Traffic(ranks, times * gradients, 0, gradients, messages + 1)
    bucket = STAGE_0_ELEMENTS if spec.family == "deepspeed" else DDP_BYTES // size
    return Traffic(ranks, gradients, 0, 0, _messages(trained, bucket, overfilled=True))


def _stage_3(run: Run, network: Network, trained: Sequence[int]) -> Traffic:
    """Returns the collectives of stage 3. `trained` has the number of elements of each trained weight, the last weight
    first."""
    placement, zero = run.placement, run.placement.zero
    times, size = placement.accumulate, parameter_size(run.spec, placement.precision)
    sharded: list[int] = []
    for weight in network.weights:
        if weight.elements > zero.param_persistence_threshold:
            sharded.append(weight.elements)
    again: list[int] = []  # gathered in the backward pass
    passed = 0
    for elements in reversed(sharded):
        passed += elements
        if passed > formulas.REUSE_ELEMENTS // 2:
            again.append(elements)
    once = network.elements - sum(sharded)
    gathered = times * (sum(sharded) + sum(again)) + once
    messages = _messages(trained, zero.reduce_bucket_size)
    messages += _messages([*sharded, *again], zero.prefetch_bucket_size, overfilled=True)
    messages = times * messages + len(network.weights) - len(sharded)
    return Traffic(placement.world_size, 0, times * network.trained * size, gathered * size, messages)


def _messages(sizes: Sequence[int], bucket: int, overfilled: bool = False) -> int:
    """Returns the number of buckets in which tensors are sent. A bucket is closed before a tensor would exceed its size
    or, if `overfilled`, after a tensor has exceeded it. A tensor that is larger than a bucket is sent in a separate
    bucket."""
    messages, filled = 0, bucket + 1
    for size in sizes:
        if filled + size * (not overfilled) > bucket:
            messages, filled = messages + 1, 0
        filled += size
    return messages
