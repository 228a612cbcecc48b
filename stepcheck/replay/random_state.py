"""Reads and restores the states of the random generators that a training step may use."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """Returns the states of Python's, NumPy's (if it is imported) and torch's random generators. Of the GPUs, only the
    rank's own generator is read, because reading all of them would initialize every GPU in each rank."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def same_random_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Returns whether torch's random generators are in the same state. Those of Python and NumPy are not compared."""
    return all(torch.equal(one[key], other[key]) for key in ("torch", "cuda") if key in one and key in other)


@contextmanager
def random_state_kept() -> Iterator[None]:
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
