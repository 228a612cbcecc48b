"""Known causes for which a run differs from its reference, told from what both wrote down; no torch."""

from __future__ import annotations

from collections.abc import Iterator

from comparison.reading import Loaded
from comparison.result import Curve


def causes(reference: Loaded, other: Loaded, normalises: bool) -> list[str]:
    """Those that apply to a run that is not bit-identical to its reference, a sentence each.

    Args:
        reference: a run of it.
        other: a run of the same seed.
        normalises: whether the network has batch normalisations.
    """
    ours, theirs = [*_of_deepspeed(reference)], [*_of_deepspeed(other)]
    return [
        *(cause if cause not in ours else f"In both runs: {cause}" for cause in theirs),
        *(f"In the reference: {cause}" for cause in ours if cause not in theirs),
        *_of_casting(reference, other),
        *_of_the_shape(reference, other, normalises),
        *_of_the_schedule(reference, other),
    ]


def _of_deepspeed(run: Loaded) -> Iterator[str]:
    """What DeepSpeed does in another way than torch in one of both."""
    zero = run.deepspeed.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    ranks = run.metrics["world_size"]
    if zero.get("overlap_comm") and ranks > 1:
        yield (
            "overlap_comm is on: gradients are sent while others are still being computed, which has a history of "
            "wrong losses (DeepSpeed issues 4298, 5347 and 8061); set it to false."
        )
    if stage and run.settings.get("gradient_clip_val"):
        yield "Clipping: ZeRO adds the gradients' norm up shard by shard, torch over whole gradients (about 1e-7)."
    dtype = run.deepspeed.get("communication_data_type", "float32")
    if dtype != "float32" and ranks > 1:
        yield f"Gradients are added up over the ranks in {dtype}: communication_data_type fp32 adds them in float32."
    if stage >= 2 and ranks > 1 and run.metrics["accumulate"] > 1:
        yield f"Accumulation: stage {stage} adds gradients up over the ranks before the micro-batches, DDP after."
    device = zero.get("offload_optimizer") or {}
    if device.get("device", "none") != "none" and run.settings["optimizer"]["name"] != "sgd":
        yield "The offloaded optimizer is DeepSpeed's own on the CPU, which rounds in another order than torch's."


def _of_casting(reference: Loaded, other: Loaded) -> Iterator[str]:
    """What the lower precisions do in other ways."""
    if "mixed" in other.metrics["precision"] and bool(other.deepspeed) != bool(reference.deepspeed):
        yield "Mixed precision: DeepSpeed casts the network, torch's autocast each operation that gains by it."
    skipped = [loaded.metrics.get("skipped_steps") or 0 for loaded in (reference, other)]
    if skipped[0] != skipped[1]:
        yield f"float16 skipped {skipped[1]} steps, the reference {skipped[0]}: their loss scales move in other ways."


def _of_the_shape(reference: Loaded, other: Loaded, normalises: bool) -> Iterator[str]:
    """The number of ranks and micro-batches."""
    for key, what in (("accumulate", "micro-batches a step"), ("world_size", "ranks")):
        before, now = reference.metrics[key], other.metrics[key]
        if before != now:
            yield f"{now} {what} against {before}: the mean of the gradients is added up in other parts."
    sizes = [loaded.metrics["micro_batch_size"] for loaded in (reference, other)]
    if normalises and sizes[0] != sizes[1]:
        yield (
            f"Batch normalisation is over a micro-batch, here {sizes[1]} images and in the reference {sizes[0]}: "
            "that is no rounding."
        )


def _of_the_schedule(reference: Loaded, other: Loaded) -> Iterator[str]:
    rates = [loaded.run.curves.get("train/learning_rate", Curve([], [])) for loaded in (reference, other)]
    before, now = (dict(zip(curve.steps, curve.values, strict=True)) for curve in rates)
    parting = next((step for step in before if step in now and before[step] != now[step]), None)
    if parting is not None:
        yield (
            f"The learning rates are not equal at step {parting}: a schedule that is stepped for each micro-batch, or "
            "not where float16 skips a step."
        )
