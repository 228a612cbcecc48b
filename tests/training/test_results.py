import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from cifar_zero.training.results import MEASURED, print_summary, print_test_table

TABLE = {"zero [0]": 0.25, "one": 0.75}
RUN: dict[str, Any] = {
    **dict.fromkeys(MEASURED, 1),
    **{key: TABLE for key in MEASURED if key.endswith("_per_class")},
    **{"dataset": "digits", "model": "net", "strategy": "baseline", "device_name": "a CPU", "precision": "32-true"},
    **{"num_train": 45_000, "num_test": 10_000, "steps": 22_500, "batch_size": 4, "epochs": 2.0},
    **{"test/acc": 0.5432, "perf/images_per_second": 1234.5},
    **{"mem/peak_rank_bytes": [10**9, 2 * 10**9], "mem/model_state_rank_bytes": [10**6, 10**6], "world_size": 2},
    **{
        "perf/step_time_ms": 1.2,
        "perf/data_time_ms": 0.05,
        "perf/tokens_per_second": None,
    },
}


def printed(show: Any, *arguments: Any) -> str:
    with redirect_stdout(io.StringIO()) as output, pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "120")
        show(*arguments)
    return output.getvalue()


def test_the_summary_contains_the_main_figures() -> None:
    run_dir = Path("my runs/net-baseline/version_3")
    text = printed(print_summary, {**RUN, "fallback": "CIFAR-10 is not available"}, run_dir)
    speed = "1,234 images/s, 1.20 ms per step, 0.05 ms of it waiting for data"
    for expected in ("54.32%", "zero [0]", speed, "at most 2.00 GB per rank", "WARNING: CIFAR-10 is not", str(run_dir)):
        assert expected in text
    assert "tensorboard --logdir 'my runs' --host localhost  # then open http://localhost:6006/#custom_scalars" in text
    assert "WARNING" not in printed(print_summary, RUN, run_dir)


def test_the_summary_of_a_run_that_was_not_tested() -> None:
    nothing = dict.fromkeys(("test/acc", "test/acc_per_class", "perf/images_per_second", "perf/step_time_ms"))
    empty = {"mem/peak_rank_bytes": [], "mem/model_state_rank_bytes": []}
    assert "accuracy" not in printed(print_summary, {**RUN, **nothing, **empty}, Path("runs/a/version_0"))


def test_a_class_without_images_and_a_model_without_top_5() -> None:
    """The table has no metric for a class that lacks it."""
    nothing = {"zero [0]": float("nan"), "one": 0.75}
    text = printed(print_test_table, {**RUN, "test/acc_per_class": nothing, "test/acc_top5": None})
    assert [cell.strip() for cell in next(line for line in text.splitlines() if "zero" in line).split("│")[1:-1]] == [
        *("zero [0]", "nan%", "25.00%", "25.00%")
    ]
    assert "top-5" not in text
    assert "top-5" in printed(print_test_table, RUN)


def test_of_a_hundred_classes_only_the_mean_is_printed() -> None:
    accuracies = {f"class {label:07d}": label / 100 for label in range(100)}
    text = printed(print_test_table, {**RUN, "test/acc": 0.495, "test/acc_per_class": accuracies})
    assert "class 0" not in text
    assert "49.50%" in text
