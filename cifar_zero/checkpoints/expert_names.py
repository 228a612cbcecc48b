"""Translates the names of the weights of a mixture of experts: DeepSpeed numbers each rank's experts from 0."""

import re
from collections.abc import Iterable

GATE = ".deepspeed_moe.gate."
"""DeepSpeed's form of `.gate.`."""

EXPERT = re.compile(r"(.*)\.deepspeed_moe\.experts\.deepspeed_experts\.(\d+)\.(.*)")
"""DeepSpeed's name of an expert's weight: the mixture, the expert's number, its own name."""


def plain_names(names: Iterable[str], rank: int = 0) -> dict[str, str]:
    """Returns the plain name for each of DeepSpeed's: those of a rank, `rank` among those that share the experts of a
    mixture, or those of all weights with the experts of all ranks."""
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
