import io

import numpy as np
import pytest

from cifar_zero.reports.figures import calibration_figure, precision_recall_figure, roc_figure

NAMES = [f"class {label}" for label in range(100)]
STEP = (np.array([0.0, 0.0, 1.0]), np.array([0.0, 0.6, 1.0]))


def legend_of(figure: object) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]  # pyright: ignore


def test_ten_classes_have_a_line_and_a_name_each_in_their_order() -> None:
    areas = np.linspace(0.5, 0.95, 10)
    figure = roc_figure([STEP] * 10, areas, NAMES[:10])
    named = [f"class {label} ({area:.3f})" for label, area in enumerate(areas)]
    assert legend_of(figure) == [*named, "macro mean (0.725)", "chance"]
    lines = figure.axes[0].get_lines()
    assert len({line.get_color() for line in lines[:10]}) == 10
    assert np.asarray(lines[0].get_ydata())[-1] == 1
    assert figure.axes[0].get_title() == "ROC curves, macro AUROC 0.7250"


def test_of_a_hundred_classes_the_best_and_the_worst_five_are_named() -> None:
    averages = np.random.default_rng(0).permutation(100) / 100
    averages[7] = np.nan  # a class without images
    figure = precision_recall_figure([(STEP[0][::-1], STEP[1][::-1])] * 100, averages, NAMES)
    order = np.argsort(-np.nan_to_num(averages, nan=-1))[:99]
    best, worst = ([f"class {label} ({averages[label]:.3f})" for label in part] for part in (order[:5], order[-5:]))
    assert legend_of(figure) == ["89 between", *best, *worst, f"macro mean ({np.nanmean(averages):.3f})"]
    figure.savefig(io.BytesIO())


@pytest.mark.parametrize("totals", [[[0, 0, 0], [10, 4, 5], [30, 27, 15]], [[0, 0, 0], [0, 0, 0], [5, 5, 5]]])
def test_the_bars_of_the_reliability_diagram(totals: list[list[float]]) -> None:
    filled = [bin for bin in totals if bin[0]]
    axes, below = (figure := calibration_figure(np.array(totals, dtype=np.float64), 0.3)).axes
    accuracy, gap = axes.containers
    assert [bar.get_height() for bar in accuracy] == pytest.approx([right / n for n, _, right in filled])  # pyright: ignore
    tops = [bar.get_y() + bar.get_height() for bar in gap]  # pyright: ignore
    assert tops == pytest.approx([confidence / n for n, confidence, _ in filled])
    assert [bar.get_height() for bar in below.containers[0]] == [n for n, *_ in filled]  # pyright: ignore
    assert "(ECE) 30.00%" in axes.get_title()
    figure.savefig(io.BytesIO())


def test_where_no_class_has_images_nothing_is_drawn() -> None:
    figure = roc_figure([STEP] * 3, np.full(3, np.nan), NAMES[:3])
    assert legend_of(figure) == ["chance"]
