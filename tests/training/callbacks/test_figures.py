from collections.abc import Callable
from typing import Any

import pytest
import torch

from cifar_zero.config.recipe import NORMALIZATIONS, inputs
from cifar_zero.config.settings import make_settings
from cifar_zero.data.augment import normalize
from cifar_zero.training.callbacks import figures

NAMES = ("confusion_matrix", "mistakes", "roc", "precision_recall")


def test_the_most_confident_mistakes_of_all_batches_are_kept(
    fit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares with all test images in one pass."""
    drawn: dict[str, Any] = {}
    draw_mistakes, draw_confusion = figures.mistakes_figure, figures.confusion_figure

    def keep_mistakes(images: Any, true: Any, predicted: Any, confidence: Any, names: Any) -> Any:
        drawn.update(images=images, true=true, predicted=predicted, confidence=confidence)
        return draw_mistakes(images, true, predicted, confidence, names)

    def keep_confusion(counts: Any, names: Any) -> Any:
        drawn["counts"] = counts
        return draw_confusion(counts, names)

    monkeypatch.setattr(figures, "mistakes_figure", keep_mistakes)
    monkeypatch.setattr(figures, "confusion_figure", keep_confusion)
    run = fit(make_settings(epochs=1, batch_size=8), 32, figures.TestFigures())
    run.trainer.test(run.module, datamodule=run.datamodule, verbose=False)

    images, labels = run.datamodule.test_images[:-1], run.datamodule.test_labels[:-1]  # without the padding
    with torch.no_grad():
        confidence, predicted = run.module(images).softmax(dim=1).max(dim=1)
    wrong = (predicted != labels).nonzero().squeeze()
    expected = wrong[confidence[wrong].argsort(descending=True)][: figures.SHOWN]
    assert len(expected) == 24
    assert drawn["confidence"] == pytest.approx(confidence[expected].numpy(), rel=1e-5)
    assert (drawn["images"] == images[expected].numpy()).all()
    assert (drawn["true"] == labels[expected].numpy()).all()
    assert (drawn["predicted"] == predicted[expected].numpy()).all()

    per_class = run.module.test_metrics.per_class()["acc"]
    assert (drawn["counts"].diag() / drawn["counts"].sum(1)).tolist() == pytest.approx(per_class.tolist(), nan_ok=True)

    for name in NAMES:
        assert (run.folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    tags = run.read().events.Tags()["images"]
    assert set(tags) == {f"figures/{name}" for name in NAMES}


def test_normalised_images_become_pixels_again() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).repeat(1, 3, 1, 1)
    for name in NORMALIZATIONS:
        seen = inputs(16, name)
        assert torch.equal(figures.as_pixels(normalize(pixels, seen), seen), pixels)
        assert torch.equal(figures.as_pixels(pixels, seen), pixels)


def test_a_perfect_test_has_no_mistakes() -> None:
    scores, labels = torch.eye(10), torch.arange(10)
    confidence, *_ = figures.surest_mistakes(scores, torch.zeros(10, 3, 32, 32), labels)
    assert len(confidence) == 0
