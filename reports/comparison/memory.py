"""The memory of a variant, from its runs' metrics.json."""

from __future__ import annotations

from comparison.result import ModelStates, Run, Variant

PARTS = ("parameters", "gradients", "optimizer")
"""Of the model states, as ZeRO names them (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054)."""

_KEYS = [f"mem/{part}_rank_bytes" for part in ("parameter", "gradient", "optimizer")]


def model_states(variant: Variant) -> ModelStates | None:
    """Bytes on the fullest rank of all runs, part by part; None where the parts were not measured."""
    of_ranks = [
        ModelStates(*parts)
        for run in variant.runs
        for parts in zip(*(_of_ranks(run, key) for key in _KEYS), strict=False)
    ]
    return max(of_ranks, key=total, default=None)


def total(states: ModelStates) -> int:
    """Bytes of all parts."""
    return states.parameters + states.gradients + states.optimizer


def model_state_bytes(variant: Variant) -> int | None:
    """Bytes of the model states on the fullest rank of all runs; None where they were not measured."""
    measured = [value for run in variant.runs for value in _of_ranks(run, "mem/model_state_rank_bytes")]
    return max(measured, default=None)


def peaks(variant: Variant) -> list[int]:
    """Most bytes held, of each rank, in the run of the fullest rank; empty where none were measured."""
    return max(
        (_of_ranks(run, "mem/peak_rank_bytes") for run in variant.runs),
        key=lambda ranks: max(ranks, default=0),
        default=[],
    )


def _of_ranks(run: Run, key: str) -> list[int]:
    return run.metrics.get(key) or []
