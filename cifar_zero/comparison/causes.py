"""Known causes of a difference between a run and its reference, found from the files of both runs; no torch.

A cause that is rounding explains only the verdict "within rounding", not "different".
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from cifar_zero.comparison.agreement import Pair
from cifar_zero.comparison.result import Curve, Run, VerdictKind

FP32 = "float32"


class Cause(NamedTuple):
    """A row of the table."""

    sentence: str
    applies: Callable[[Pair], bool]
    is_rounding: bool = True  # whether the same numbers are only summed in another order or format


def _either(applies: Callable[[Run], bool]) -> Callable[[Pair], bool]:
    """Returns a condition that holds if it holds for one run or both."""
    return lambda pair: applies(pair.reference) or applies(pair.other)


def _differs(key: str) -> Callable[[Pair], bool]:
    """Returns a condition that holds if the runs have different values in metrics.json."""
    return lambda pair: (pair.reference.metrics.get(key) or 0) != (pair.other.metrics.get(key) or 0)


def _zero(run: Run) -> dict[str, Any]:
    return run.deepspeed.get("zero_optimization", {})


def _several_ranks(run: Run) -> bool:
    return run.metrics["world_size"] > 1


def _offloads(run: Run) -> bool:
    return (_zero(run).get("offload_optimizer") or {}).get("device", "none") != "none"


def _rates_differ(pair: Pair) -> bool:
    runs = (pair.reference, pair.other)
    ours, theirs = (run.curves.get("train/learning_rate", Curve([], [])).by_step for run in runs)
    return any(ours[step] != theirs[step] for step in ours.keys() & theirs.keys())


CAUSES = (
    Cause(
        "overlap_comm is on: gradients are sent while others are still being computed, which has a history of wrong "
        "losses (DeepSpeed issues 4298, 5347 and 8061); set it to false.",
        _either(lambda run: bool(_zero(run).get("overlap_comm")) and _several_ranks(run)),
        is_rounding=False,
    ),
    Cause(
        "Clipping: ZeRO sums the norm of the gradients shard by shard, torch over whole gradients (about 1e-7).",
        _either(lambda run: _zero(run).get("stage", 0) > 0 and bool(run.settings.get("gradient_clip_val"))),
    ),
    Cause(
        "Gradients are summed over the ranks in a lower precision; set communication_data_type to fp32.",
        _either(lambda run: _several_ranks(run) and run.deepspeed.get("communication_data_type", FP32) != FP32),
    ),
    Cause(
        "Accumulation: stages 2 and 3 sum gradients over the ranks before the micro-batches, DDP after.",
        _either(lambda run: _zero(run).get("stage", 0) >= 2 and _several_ranks(run) and run.metrics["accumulate"] > 1),
    ),
    Cause(
        "The offloaded optimizer is DeepSpeed's own on the CPU, which rounds in another order than torch's.",
        _either(lambda run: _offloads(run) and run.settings["optimizer"] != "sgd"),
    ),
    Cause(
        "Mixed precision: DeepSpeed casts the model, torch's autocast only operations that benefit.",
        lambda pair: (
            "mixed" in pair.other.metrics["precision"] and bool(pair.other.deepspeed) != bool(pair.reference.deepspeed)
        ),
    ),
    Cause("The number of micro-batches differs: gradients are summed in other parts.", _differs("accumulate")),
    Cause("The number of ranks differs: gradients are summed in other parts.", _differs("world_size")),
    Cause(
        "Batch normalisation works on a micro-batch, and the sizes of the micro-batches differ.",
        lambda pair: pair.normalises and _differs("micro_batch_size")(pair),
        is_rounding=False,
    ),
    Cause(
        "float16 skipped different numbers of steps: the loss scales changed differently.",
        _differs("skipped_steps"),
        is_rounding=False,
    ),
    Cause(
        "The learning rates differ: a schedule steps once per micro-batch, or also when float16 skips a step.",
        _rates_differ,
        is_rounding=False,
    ),
)


def causes(pair: Pair, kind: VerdictKind) -> list[str]:
    """Returns the known causes that may explain a verdict on a pair, one sentence each."""
    if kind not in ("within rounding", "different"):
        return []
    candidates = (cause for cause in CAUSES if kind == "within rounding" or not cause.is_rounding)
    return [cause.sentence for cause in candidates if cause.applies(pair)]
