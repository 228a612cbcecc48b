import io
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from rich.console import Console

from cifar_zero.config.settings import Settings, make_settings
from cifar_zero.training.callbacks import progress

Show = Callable[..., str]


class StopAt(Callback):
    """Stops the training after a step, in the middle of an epoch, as a signal does."""

    def __init__(self, step: int):
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.should_stop, trainer.limit_val_batches = True, 0


@pytest.fixture
def shown_by(fit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Show:
    """A function that returns what a run prints, without the terminal's control sequences."""

    def show(settings: Settings, terminal: bool, *callbacks: Callback, **options: Any) -> str:
        console = Console(file=io.StringIO(), force_terminal=terminal, width=110, highlight=False)
        monkeypatch.setattr(progress, "Console", lambda **_: console)
        monkeypatch.setattr(progress, "BAR_INTERVAL_S", 0.0 if terminal else math.inf)
        run = fit(settings, 40, *callbacks, **options)
        run.trainer.test(run.module, datamodule=run.datamodule, verbose=False)
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())  # pyright: ignore

    return show


def test_plain_lines_at_the_log_interval(shown_by: Show) -> None:
    lines = shown_by(make_settings(epochs=2, batch_size=4, log_interval=5), terminal=False, warmup_steps=6).splitlines()
    steps = [line for line in lines if line.startswith("Step ")]
    assert [line.split(" | ")[0] for line in steps] == ["Step 5/20", "Step 10/20", "Step 15/20", "Step 20/20"]
    warming = r"Step 5/20 | epoch 1/2 | Loss: \d\.\d{4} | Learning rate: 0.001"
    timed = r" | Time: [\d.]+ms | \d+\.\d [MG]FLOP/s | Images/s: \d+ | 0:00:\d\d left"
    assert re.match(warming.replace(" | ", r" \| ") + r"( \| 0:00:\d\d left)?$", steps[0])
    assert re.fullmatch((warming.replace("5/20", "10/20") + timed).replace(" | ", r" \| "), steps[1])
    assert steps[3].endswith(" | 0:00:00 left")
    assert [line for line in lines if "val/acc" in line][1].startswith("epoch 2/2  val/loss ")
    assert len(lines) == 6


def test_a_bar_on_a_terminal(shown_by: Show) -> None:
    shown = shown_by(make_settings(epochs=2, batch_size=4, log_interval=5), terminal=True)
    assert re.search(r"epoch 2/2 ━+ 20/20 loss \d\.\d{3}  [\d,]+ images/s 0:00:\d\d 0:00:00 left", shown)
    assert re.search(r"test ━+ 3/3", shown)


def test_a_run_that_is_stopped_in_an_epoch(shown_by: Show) -> None:
    lines = shown_by(make_settings(epochs=3, batch_size=4, log_interval=5), False, StopAt(12)).splitlines()
    assert lines[-1].startswith("Step 12/30 | epoch 2/3 | Loss")
    bar = shown_by(make_settings(epochs=3, batch_size=4, log_interval=5), True, StopAt(12))
    assert "epoch 2/3" in bar
    assert "epoch 3/3" not in bar


def test_runs_of_unknown_length(shown_by: Show) -> None:
    config = make_settings(epochs=-1, batch_size=4, log_interval=5)
    lines = shown_by(config, False, StopAt(6)).splitlines()
    assert any(re.match(r"Step 5 \| epoch 1 \| Loss", line) for line in lines)
