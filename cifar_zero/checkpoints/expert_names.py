"""Translates the names of the weights of a mixture of experts.

DeepSpeed numbers each rank's experts from 0; the plain model has all experts.
"""

import re
from collections.abc import Iterable

GATE = ".deepspeed_moe.gate."
"""DeepSpeed's form of `.gate.`."""

EXPERT = re.compile(r"(.*)\.deepspeed_moe\.experts\.deepspeed_experts\.(\d+)\.(.*)")
"""DeepSpeed's name of an expert's weight: the mixture, the expert's number, its own name."""


def plain_names(names: Iterable[str], rank: int = 0) -> dict[str, str]:
    """Returns the plain name for each of DeepSpeed's.

    Args:
        names: of all weights of a rank, or with the experts of all ranks.
        rank: among those that share the experts of a mixture; 0 if the experts of all ranks are given.
    """
    found = {name: EXPERT.fullmatch(name) for name in names}
    numbers: dict[str, set[str]] = {}
    for expert in filter(None, found.values()):
        numbers.setdefault(expert[1], set()).add(expert[2])
    return {
        name: f"{expert[1]}.experts.{rank * len(numbers[expert[1]]) + int(expert[2])}.{expert[3]}"
        if expert
        else name.replace(GATE, ".gate.")
        for name, expert in found.items()
    }


def in_order(dense: Iterable[str], experts: Iterable[str]) -> list[str]:
    """Returns plain names in the order of the model, where the experts of a mixture follow its gate."""
    experts, names = [*experts], []
    for name in dense:
        names.append(name)
        mixture, gate, _ = name.partition(".gate.")
        if gate:
            names += [expert for expert in experts if expert.startswith(f"{mixture}.experts.")]
    return names
