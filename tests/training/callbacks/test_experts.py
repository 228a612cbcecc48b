from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cifar_zero.config.recipe import Choice
from cifar_zero.config.settings import Settings, make_settings
from cifar_zero.models.moe import Routing, gates
from cifar_zero.reports.figures import expert_figure
from cifar_zero.training.callbacks import experts
from cifar_zero.training.callbacks.experts import Experts, experts_of_classes
from tests.support.helpers import run_folder_of, train_all

Fit = Callable[..., Any]

NUM_EXPERTS = [2, 4]


class Witness(Callback):
    """Records, at every micro-batch, how each mixture routes its tokens."""

    def __init__(self) -> None:
        self.routings: list[list[Routing]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.routings.append(routings(module))


class Stop(Callback):
    """Ends the run after six optimizer steps; Lightning validates then."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == 6


def routings(module: Any) -> list[Routing]:
    """Returns each mixture's routing in the last forward pass."""
    return [routing for gate in gates(module.net) if (routing := gate.routing) is not None]


def config(top_k: int = 1) -> Settings:
    """Returns a configuration of ten optimizer steps of two micro-batches of eight images, experts with room for half
    of the tokens, and points at steps 4, 8 and 10."""
    model = Choice("net_moe", {"num_experts": NUM_EXPERTS, "top_k": top_k, "capacity_factor": 0.5})
    return make_settings(epochs=2, batch_size=16, accumulate=2, log_interval=4, model=model)


def share_of_largest_entropy(routing: Routing) -> float:
    p = routing.probabilities.double().numpy()
    return float(-(p * np.log(p)).sum(axis=1).mean() / np.log(p.shape[1]))


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_curves_agree_with_the_routings(fit: Fit, top_k: int) -> None:
    witness = Witness()
    run = fit(config(top_k), 80, Experts(), witness)
    assert len(witness.routings) == 20
    for number, num_experts in enumerate(NUM_EXPERTS):
        name = f"mixture_{number}"
        dropped = run.points(f"moe/dropped/{name}")
        tokens = [run.points(f"moe/tokens/{name}/expert_{expert}") for expert in range(num_experts)]
        assert list(dropped) == list(run.points("train/loss")) == [4, 8, 10]
        assert min(dropped.values()) > 0  # otherwise this would test nothing
        for first, last in ((0, 4), (4, 8), (8, 10)):
            seen = [of_all[number] for of_all in witness.routings[2 * first : 2 * last]]
            sent_to = torch.cat([routing.experts for routing in seen], dim=1)
            assert dropped[last] == pytest.approx((sent_to == -1).double().mean().item(), rel=1e-6)
            for expert in range(num_experts):
                assert tokens[expert][last] == (sent_to == expert).sum().item() / (last - first)
            assert sum(of_one[last] for of_one in tokens) == pytest.approx(16 * top_k * (1 - dropped[last]), rel=1e-6)
            losses = torch.stack([routing.load_balance_loss.detach() for routing in seen])
            assert run.points(f"moe/load_balance_loss/{name}")[last] == pytest.approx(losses.mean().item(), rel=1e-6)
            entropy = run.points(f"moe/gate_entropy/{name}")[last]
            assert entropy == pytest.approx(share_of_largest_entropy(seen[-1]), rel=1e-6)


def test_the_last_point_of_a_run_that_is_stopped_early_is_that_of_the_training(fit: Fit) -> None:
    witness = Witness()
    run = fit(config(), 160, Experts(), witness, Stop())
    for number, routing in enumerate(witness.routings[-1]):
        assert routings(run.module)[number] is not routing  # this one is of the validation after it
        entropy = run.points(f"moe/gate_entropy/mixture_{number}")
        assert list(entropy) == [4, 6]
        assert entropy[6] == pytest.approx(share_of_largest_entropy(routing), rel=1e-6)


def test_the_experts_of_each_class_of_the_test(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares with all test images in one pass."""
    drawn: dict[str, Any] = {}

    def keep(counts: Any, class_names: Any) -> Any:
        drawn["counts"] = counts
        return expert_figure(counts, class_names)

    monkeypatch.setattr(experts, "expert_figure", keep)
    run = fit(config(top_k=2), 32, Experts())
    run.trainer.test(run.module, datamodule=run.datamodule, verbose=False)

    images, labels = run.datamodule.test_images[:-1], run.datamodule.test_labels[:-1]  # without the padding
    with torch.no_grad():
        run.module.eval()(images)
    for routing, counts in zip(routings(run.module), drawn["counts"], strict=True):
        expected = np.zeros_like(counts)
        for choice in routing.experts:
            np.add.at(expected, (labels.numpy(), choice.numpy()), 1)
        assert np.array_equal(counts, expected)
        assert counts.sum(axis=1).tolist() == (2 * labels.bincount(minlength=10)).tolist()

    assert (run.folder / "experts.png").read_bytes().startswith(b"\x89PNG")
    assert "figures/experts" in run.read().events.Tags()["images"]


def test_tokens_count_for_the_class_of_their_image() -> None:
    """Three tokens per image, one of which is dropped; the second image is padding."""
    labels = torch.tensor([1, -1, 0])
    sent_to = torch.tensor([[0, 1, 1, 0, 0, 0, 1, 1, 1], [1, -1, 0, 1, 1, 1, 0, 0, 0]])
    counts = experts_of_classes(labels, sent_to, num_classes=3, num_experts=2)
    assert counts.tolist() == [[3, 3], [2, 3], [0, 0]]


def test_panels_show_shares_of_each_class() -> None:
    counts = [np.array([[3, 1], [0, 0], [0, 8]]), np.array([[1, 2, 1], [0, 0, 0], [4, 0, 4]])]
    names = ["bird", "cat", "dog"]
    panels = expert_figure(counts, names).axes[:2]
    assert [axes.get_title() for axes in panels] == ["mixture 0: 2 experts", "mixture 1: 3 experts"]
    assert np.array_equal(np.asarray(panels[0].images[0].get_array()), [[0.75, 0.25], [0, 0], [0, 1]])
    written = [{text.get_position()[::-1]: text.get_text() for text in axes.texts} for axes in panels]
    assert written[0] == {(0, 0): "75", (0, 1): "25", (2, 1): "100"}
    assert written[1] == {(0, 0): "25", (0, 1): "50", (0, 2): "25", (2, 0): "50", (2, 2): "50"}
    assert [label.get_text() for label in panels[0].get_yticklabels()] == names


def test_many_panels_and_classes() -> None:
    counts = [np.ones((100, num_experts), dtype=np.int64) for num_experts in (2, 2, 4, 4, 8, 16, 16)]
    figure = expert_figure(counts, [f"class {label}" for label in range(100)])
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title().split()[2] for axes in panels] == ["2", "2", "4", "4", "8", "16", "16"]
    assert not any(axes.texts or axes.get_yticklabels() for axes in panels)
    assert figure.get_size_inches()[0] < 20


@pytest.mark.distributed
def test_two_ranks_count_all_tokens(small_data: list[str], tmp_path: Path) -> None:
    options = ["--model", "net_moe", "--model.num_experts", "[2]", "--model.capacity_factor", "2"]
    length = ["--batch_size", "32", "--max_steps", "3", "--log_interval", "2", "--data.val_fraction", "0"]
    train_all({tmp_path: [*small_data, *options, *length, "--devices", "2", "--accelerator", "cpu"]})
    folder = run_folder_of(tmp_path)
    events = EventAccumulator(str(folder))
    events.Reload()

    def values(curve: str) -> list[float]:
        return [event.value for event in events.Scalars(f"moe/{curve}")]

    tokens = [values(f"tokens/mixture_0/expert_{expert}") for expert in range(2)]
    assert [sum(of_both) for of_both in zip(*tokens, strict=True)] == [32, 32]
    assert values("dropped/mixture_0") == [0, 0]
    assert values("load_balance_loss/mixture_0") == pytest.approx([1, 1], abs=0.2)
    assert values("gate_entropy/mixture_0") == pytest.approx([1, 1], abs=0.2)
    assert (folder / "experts.png").exists()
