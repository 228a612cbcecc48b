import io

import numpy as np
import pytest
import torch

from cifar_zero.training.callbacks.figures import curve_figure

NAMES = [f"class {label}" for label in range(100)]
STEP = (torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.0, 0.6, 1.0]))


def legend_of(figure: object) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]  # pyright: ignore


def test_each_class_has_a_line_and_a_name() -> None:
    areas = torch.linspace(0.5, 0.95, 10)
    areas[3] = torch.nan
    figure = curve_figure(tuple([each] * 10 for each in STEP), areas, NAMES[:10], "AUROC", ("x", "y"))
    assert legend_of(figure) == [f"class {label} AUC={areas[label]:.3f}" for label in range(10)]
    assert np.asarray(figure.axes[0].get_lines()[0].get_ydata())[-1] == 1
    assert figure.axes[0].get_title().startswith("AUROC 0.7")


@pytest.mark.parametrize("value", [0.5, torch.nan])
def test_a_hundred_classes_have_no_legend(value: float) -> None:
    figure = curve_figure(tuple([each] * 100 for each in STEP), torch.full((100,), value), NAMES, "AUROC", ("x", "y"))
    assert figure.axes[0].get_legend() is None
    figure.savefig(io.BytesIO())
