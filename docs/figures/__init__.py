"""The figures of docs/course, most of them drawn by the program's own functions."""

from collections.abc import Callable
from pathlib import Path

from docs.figures import models, ranks

DOCS = Path(__file__).resolve().parents[1]

FIGURES: tuple[Callable[[], None], ...] = (
    models.net_shapes,
    models.computation_graph,
    models.activations,
    models.learning_rates,
    models.lora,
    ranks.zero_memory,
    ranks.zero3_timeline,
    ranks.parallelism,
    ranks.audit,
    ranks.two_releases,
    models.confusion_roc,  # trains for about 20 seconds
)


def file_of(figure: Callable[[], None]) -> Path:
    """Returns the file of a figure."""
    folder = DOCS if figure is ranks.two_releases else DOCS / "course" / "figures"
    return folder / f"{figure.__name__}.png"
