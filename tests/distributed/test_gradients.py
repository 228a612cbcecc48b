"""--log_gradients and --reduce_on_plateau on two ranks: the same points under every strategy, and
after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.helpers import WHOLE, run_folder_of, train_all

pytestmark = pytest.mark.distributed

STRATEGIES = ["ddp", "deepspeed_stage_3", *(["deepspeed_stage_1", "fsdp2"] if WHOLE else [])]


def scalars(folder: Path) -> dict[str, list[float]]:
    events = EventAccumulator(str(run_folder_of(folder)), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_equal_under_every_strategy(tmp_path: Path, small_data: list[str]) -> None:
    same = [*small_data, "--accelerator", "cpu", "--devices", "2", "--batch_size", "32", "--accumulate", "2"]
    same += ["--log_gradients", "--log_interval", "3", "--gradient_clip_val", "0.05"]
    # So small that float32 rounds every step away: the loss stays where it is.
    same += ["--reduce_on_plateau", "1", "--optimizer.lr", "1e-12", "--trainer.limit_train_batches", "8"]
    train_all({tmp_path / name: [*same, "--epochs", "3", "--strategy", name] for name in STRATEGIES})
    expected = scalars(tmp_path / "ddp")
    norms = [tag for tag in expected if tag.startswith("grad_norm/")]
    assert len(norms) == 10
    for at, norm in enumerate(expected["train/grad_norm"]):
        assert sum(expected[tag][at] ** 2 for tag in norms) ** 0.5 == pytest.approx(norm, rel=1e-4)
    assert min(expected["train/learning_rate"]) < 0.5e-12
    for name in STRATEGIES:
        found = scalars(tmp_path / name)
        for tag in (*norms, "train/learning_rate"):
            assert found[tag] == pytest.approx(expected[tag], rel=1e-3, abs=0), f"{name}, {tag}"
    resumed = {tmp_path / f"{name}-2": [*same, "--strategy", name, "--epochs", "4"] for name in STRATEGIES}
    train_all({out: [*flags, "--resume", str(tmp_path / out.name[:-2])] for out, flags in resumed.items()})
    rates = [scalars(out)["train/learning_rate"][-1] for out in resumed]
    assert rates == pytest.approx([expected["train/learning_rate"][-1] / 10] * len(rates), rel=1e-6, abs=0)
