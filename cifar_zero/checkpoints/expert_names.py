"""The names of the weights of a mixture of experts: DeepSpeed's, with each rank's experts numbered from 0, and those of
the plain network, which has them all."""

from __future__ import annotations

import re
from collections.abc import Iterable

GATE = ".deepspeed_moe.gate."
"""Stands in DeepSpeed's name where the plain name has `.gate.`."""

EXPERT = re.compile(r"(.*)\.deepspeed_moe\.experts\.deepspeed_experts\.(\d+)\.(.*)")
"""DeepSpeed's name of an expert's weight: mixture, number of the expert, its own name of the weight."""


def plain_names(names: Iterable[str], rank: int = 0) -> dict[str, str]:
    """The plain name for each of DeepSpeed's.

    Args:
        names: of all weights that the rank has.
        rank: among those that share a mixture's experts out; of experts that are numbered through, 0.
    """
    names = [*names]
    found = {name: EXPERT.fullmatch(name) for name in names}
    mixtures = [(expert[1], int(expert[2])) for expert in found.values() if expert]
    share = {mixture: 1 + max(number for of, number in mixtures if of == mixture) for mixture, _ in mixtures}
    return {
        name: f"{expert[1]}.experts.{rank * share[expert[1]] + int(expert[2])}.{expert[3]}"
        if (expert := found[name])
        else name.replace(GATE, ".gate.")
        for name in names
    }


def in_order(dense: Iterable[str], experts: Iterable[str]) -> list[str]:
    """Plain names in the order of the network, where the experts of a mixture follow its gate."""
    experts, names = [*experts], []
    for name in dense:
        names.append(name)
        mixture, gate, _ = name.partition(".gate.")
        if gate:
            names += [expert for expert in experts if expert.startswith(f"{mixture}.experts.")]
    return names
