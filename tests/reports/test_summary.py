import io
import json
import subprocess
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from cifar_zero.reports.summary import (
    MEASURED,
    git_commit,
    metrics_json,
    print_summary,
    print_test_table,
    write_json,
)

KEYS = [
    *("schema", "dataset", "num_train", "num_test", "model", "parameters", "trained_parameters"),
    *("strategy", "world_size", "num_nodes"),
    *("accelerator", "device_name", "precision", "seed", "batch_size", "micro_batch_size", "accumulate", "epochs"),
    *("steps", "train/loss", "val/acc", "test/loss", "test/acc", "test/acc_per_class", "test/acc_top5"),
    *("test/precision", "test/recall", "test/f1", "test/precision_weighted", "test/f1_weighted", "test/auroc"),
    *("test/average_precision", "test/calibration_error", "test/precision_per_class", "test/recall_per_class"),
    *("test/f1_per_class", "test/auroc_per_class", "test/average_precision_per_class", "perf/images_per_second"),
    *(
        "perf/tokens_per_second",
        "perf/step_time_ms",
    ),
    *("perf/data_time_ms", "perf/tflops", "perf/mfu", "perf/seconds_to_first_step", "perf/fit_seconds"),
    *("mem/peak_rank_bytes", "mem/model_state_rank_bytes"),
    *("mem/parameter_rank_bytes", "mem/gradient_rank_bytes", "mem/optimizer_rank_bytes"),
    *("compute_dtype", "parameter_dtype", "skipped_steps"),
    *("reduce_bucket_size", "allgather_bucket_size", "versions", "git_commit"),
]

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


def test_the_keys_are_the_contract_in_its_order() -> None:
    metrics = metrics_json(RUN)
    assert list(metrics) == KEYS
    assert metrics["schema"] == 1
    assert list(metrics["versions"]) == ["torch", "lightning", "deepspeed", "torchmetrics", "python"]
    assert list(metrics_json(RUN, fell_back=True)) == [*KEYS, "fallback"]


def test_json_is_written_whole_and_without_nan(tmp_path: Path) -> None:
    file = tmp_path / "metrics.json"
    write_json(file, {"loss": float("nan"), "deep": [{"norm": float("inf")}, 1.5]})
    assert json.loads(file.read_text(), parse_constant=pytest.fail) == {"loss": None, "deep": [{"norm": None}, 1.5]}
    with pytest.raises(TypeError):
        write_json(file, {"loss": object()})
    assert json.loads(file.read_text())["loss"] is None  # the old file still stands
    write_json(file, {"loss": 1})
    assert list(tmp_path.iterdir()) == [file]


def test_the_commit_and_whether_it_is_dirty(tmp_path: Path) -> None:
    assert git_commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    assert git_commit(tmp_path) is None  # no commit yet
    (tmp_path / "file").write_text("one")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "one"], check=True)
    subprocess.run([*git, "tag", "-a", "v1", "-m", "v1"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert git_commit(tmp_path) == head
    (tmp_path / "file").write_text("two")
    assert git_commit(tmp_path) == f"{head}-dirty"


def test_the_summary_contains_the_main_figures() -> None:
    run_dir = Path("my runs/net-baseline/version_3")
    text = printed(print_summary, metrics_json(RUN, fell_back=True), run_dir)
    speed = "1,234 images/s, 1.20 ms per step, 0.05 ms of it waiting for data"
    for expected in ("54.32%", "zero [0]", speed, "at most 2.00 GB per rank", "WARNING: CIFAR-10 is not", str(run_dir)):
        assert expected in text
    assert "tensorboard --logdir 'my runs' --host localhost  # then open http://localhost:6006/#custom_scalars" in text
    assert "WARNING" not in printed(print_summary, metrics_json(RUN), run_dir)


def test_the_summary_of_a_run_that_was_not_tested() -> None:
    nothing = dict.fromkeys(("test/acc", "test/acc_per_class", "perf/images_per_second", "perf/step_time_ms"))
    empty = {"mem/peak_rank_bytes": [], "mem/model_state_rank_bytes": []}
    assert "accuracy" not in printed(print_summary, metrics_json({**RUN, **nothing, **empty}), Path("runs/a/version_0"))


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
