"""Batch arithmetic in plain integers, so that it can be checked before torch is imported or a rank is started."""

from cifar_zero.core.errors import UsageError


def micro_batch_size(batch_size: int, world_size: int, accumulate: int) -> int:
    """Returns the images per forward pass of one rank; `batch_size` is images per optimizer step, over all ranks.

    Raises:
        UsageError: batch_size = micro-batch x world_size x accumulate has no solution in whole images.
    """
    if batch_size < 1 or accumulate < 1:
        raise UsageError(f"batch_size {batch_size} and accumulate {accumulate} must both be at least 1")
    parts = world_size * accumulate
    if batch_size % parts:
        below, above = batch_size // parts * parts, (batch_size // parts + 1) * parts
        nearest = f"{below} or {above}" if below else f"{above}"
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        raise UsageError(
            f"batch_size {batch_size} = micro-batch x {ranks} x accumulate {accumulate} "
            f"gives no whole micro-batch; the nearest that divide: {nearest}"
        )
    return batch_size // parts
