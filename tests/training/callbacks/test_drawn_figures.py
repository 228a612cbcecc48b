import io

import numpy as np
import pytest
import torch

from cifar_zero.training.callbacks.figures import confusion_figure, mistakes_figure

NAMES = [f"class {label}" for label in range(100)]


def test_colours_and_numbers_are_counts() -> None:
    counts = torch.tensor([[3, 1, 0], [0, 0, 0], [5, 0, 15]])  # no image of the second class
    axes = confusion_figure(counts, NAMES[:3]).axes[0]
    assert np.array_equal(np.asarray(axes.images[0].get_array()), counts)
    written = {(text.get_position()[1], text.get_position()[0]): text.get_text() for text in axes.texts}
    assert written == {(row, column): str(counts[row, column].item()) for row in range(3) for column in range(3)}
    assert [label.get_text() for label in axes.get_yticklabels()] == NAMES[:3]
    assert axes.get_title() == "24 test images, 75.00% correct"


def test_a_hundred_classes_are_drawn_without_text() -> None:
    axes = confusion_figure(torch.eye(100, dtype=torch.int64), NAMES).axes[0]
    assert not axes.texts


@pytest.mark.parametrize("found", [0, 2, 30])
def test_the_grid_shows_as_many_mistakes_as_there_are_up_to_24(found: int) -> None:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (found, 3, 32, 32), dtype=np.uint8)
    true, predicted = np.zeros(found, dtype=np.int64), np.ones(found, dtype=np.int64)
    figure = mistakes_figure(images, true, predicted, np.full(found, 0.9999, dtype=np.float32), NAMES)
    shown = [axes for axes in figure.axes if axes.images]
    assert len(shown) == min(found, 24)
    for axes, image in zip(shown, images, strict=False):
        assert np.array_equal(np.asarray(axes.images[0].get_array()).transpose(2, 0, 1), image)
        assert axes.get_title() == "class 0 →\nclass 1 99 %"
    figure.savefig(io.BytesIO())
