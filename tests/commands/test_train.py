"""Tests train.py and `cifar-zero evaluate`, started as a user starts them."""

import json
import math
import re
import shutil
import signal
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # pyright: ignore[reportAttributeAccessIssue]

from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.read import read
from cifar_zero.config.ds_config import get_ds_config
from cifar_zero.training.results import MEASURED
from tests.support.helpers import (
    ROOT,
    assert_ok,
    curve,
    largest_difference,
    last_weights,
    metrics_of,
    of_test_all,
    run_folder_of,
    run_program,
    small_disk,
    train_all,
    train_command,
)

LONG_ON_RANKS = [pytest.mark.distributed, of_test_all]
CLASSES = [f"class {number}" for number in range(10)]
SCALARS = {
    *("train/loss", "train/epoch", "train/global_step", "train/learning_rate", "train/grad_norm"),
    *(f"{split}/{name}" for split in ("val", "test") for name in ("loss", "acc", "acc_top5", "precision", "recall")),
    *(f"{split}/{name}" for split in ("val", "test") for name in ("f1", "calibration_error")),
    *("test/auroc", "test/average_precision"),
    *(f"{split}/{name}_class/{c}" for split in ("val", "test") for name in ("acc", "precision", "f1") for c in CLASSES),
    *("perf/step_time_ms", "perf/data_time_ms", "perf/images_per_second", "perf/tflops", "mem/peak_gb"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, small_data: list[str]) -> tuple[Path, str]:
    """Returns the run folder and the output of one plain run of two epochs."""
    out = tmp_path_factory.mktemp("out")
    flags = ["--batch_size", "16", "--log_interval", "10", "--accelerator", "cpu", "--out", str(out)]
    done = run_program("train.py", *small_data, *flags, "--test_figures", "true")
    assert_ok(done)
    return run_folder_of(out), done.stdout + done.stderr


def test_tensorboard_has_every_curve_and_figure_and_a_row_of_hparams(run: tuple[Path, str]):
    events = EventAccumulator(str(run[0]), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    events.Reload()
    assert set(events.Tags()["scalars"]) >= SCALARS
    figures = ("confusion_matrix", "roc", "precision_recall")
    assert set(events.Tags()["images"]) >= {f"figures/{name}" for name in figures}
    steps = [event.step for event in events.Scalars("train/loss")]
    assert steps == [10, 20, 30, 40, 50, 60, 70, 72]
    assert [event.step for event in events.Scalars("val/acc")] == [36, 72, 72]  # the last one for HPARAMS too
    layout = Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    assert [section.title for section in layout.category] == ["Loss", "Accuracy", "Speed", "Memory"]
    for tag in (tag for section in layout.category for chart in section.chart for tag in chart.multiline.tag):
        assert any(re.match(tag, curve) for curve in events.Tags()["scalars"]), tag
    names = ("experiment", "session_start_info")
    contents = [events.summary_metadata[f"_hparams_/{name}"].plugin_data.content for name in names]
    table, row = map(HParamsPluginData.FromString, contents)
    hparams = row.session_start_info.hparams
    assert (hparams["strategy"].string_value, hparams["batch_size"].string_value) == ("baseline", "16")
    assert hparams["lr"].number_value == 0.001
    assert [metric.name.tag for metric in table.experiment.metric_infos][:2] == ["test/acc", "val/acc"]


def test_metrics_json(run: tuple[Path, str]):
    metrics = metrics_of(run[0])
    assert list(metrics) == ["schema", *MEASURED, "versions", "git_commit"]
    assert (metrics["num_train"], metrics["num_test"], metrics["steps"], metrics["epochs"]) == (580, 640, 72, 2)
    assert metrics["parameters"] == 62_006
    assert (metrics["micro_batch_size"], metrics["accelerator"], metrics["dataset"]) == (16, "cpu", "synthetic")
    assert metrics["train/loss"] == pytest.approx(math.log(10), abs=0.2)  # random images
    for name in ("train/loss", "val/acc", "test/acc"):
        assert metrics[name] == pytest.approx(curve(run[0], name)[72], rel=1e-6)
    assert list(metrics["test/acc_per_class"]) == CLASSES
    assert metrics["perf/step_time_ms"] * metrics["perf/images_per_second"] / 1e3 == pytest.approx(16)
    assert 0 < metrics["perf/data_time_ms"] < metrics["perf/step_time_ms"]
    unknown = {"perf/mfu", "perf/tokens_per_second", "reduce_bucket_size", "allgather_bucket_size"}
    assert {key for key in MEASURED if metrics[key] is None} == unknown  # on a CPU, without transformer and DeepSpeed
    assert len(metrics["mem/peak_rank_bytes"]) == 1


def test_files_of_the_run_folder_and_output(run: tuple[Path, str]):
    folder, output = run
    left = {path.name for path in folder.iterdir()}
    assert left >= {"config.yaml", "metrics.json", "checkpoints"}  # tests/distributed/test_faults.py has the figures
    metrics = metrics_of(folder)
    for expected in (*CLASSES, f"{metrics['test/acc']:.2%}", "images/s", str(folder), "tensorboard --logdir"):
        assert expected in output
    assert not re.search("Warning|WARNING|weights_only", output)


def test_config_yaml_repeats_the_run_also_with_torchs_loader_and_lightnings_loop(run: tuple[Path, str], tmp_path: Path):
    recipe = str(run[0] / "config.yaml")
    train_all({tmp_path: ["--config", recipe, "--data.loader", "torch", "--fast_loop", "false"]})
    assert largest_difference(last_weights(tmp_path), last_weights(run[0])) == 0


def test_a_run_continues_with_its_own_options(run: tuple[Path, str], tmp_path: Path):
    """No flag of the run is repeated."""
    flags = ["--epochs", "3", "--out", str(tmp_path), "--test_figures", "false"]
    done = run_program("train.py", "--resume", str(run[0]), *flags)
    assert_ok(done)
    assert "Warning" not in done.stderr
    assert f"resumed at step 72 of {run[0]}" in done.stderr
    metrics = metrics_of(tmp_path)
    assert (metrics["steps"], metrics["micro_batch_size"], metrics["dataset"]) == (108, 16, "synthetic")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--optimizer adam", "its run has --optimizer sgd, not adam"),
        (
            "--data.synthetic_size 650",  # as many classes, but other images would be held out
            "had 640 training and 640 test images, but --data.source synthetic now has other images (650 training",
        ),
    ],
)
def test_a_run_with_another_recipe_or_other_images_is_not_resumed(
    flags: str, said: str, run: tuple[Path, str], tmp_path: Path
):
    done = run_program("train.py", "--resume", str(run[0]), *flags.split(), "--out", str(tmp_path))
    assert done.returncode == 2, done.stderr[-2000:]
    assert said in done.stderr
    assert not list(tmp_path.iterdir())


def test_evaluate_prints_the_same_table_again(run: tuple[Path, str], tmp_path: Path):
    """The checkpoint was copied out of its run folder."""
    metrics = metrics_of(run[0])
    shutil.copyfile(run[0] / "checkpoints" / "last.ckpt", tmp_path / "net.ckpt")
    done = run_program("evaluate", str(tmp_path / "net.ckpt"), "--precision", "auto")
    assert_ok(done)
    other = run_program("evaluate", str(tmp_path / "net.ckpt"), "--data.source", "digits")
    assert (other.returncode, other.stdout) == (2, "")
    assert "net.ckpt was trained on other classes than --data.source " in other.stderr
    columns = [metrics[f"test/{figure}_per_class"] for figure in ("acc", "precision", "f1")]
    expected = {name: [f"{column[name]:.2%}" for column in columns] for name in CLASSES}
    expected["all"] = [f"{metrics[f'test/{figure}']:.2%}" for figure in ("acc", "precision_weighted", "f1_weighted")]
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    assert {name: cells for name, *cells in table} == expected
    for figure in ("f1", "acc_top5", "calibration_error", "auroc", "average_precision"):
        assert f"{metrics[f'test/{figure}']:.4f}" in done.stdout


def test_bench_steps_times_that_many_steps_and_stops(small_data: list[str], tmp_path: Path):
    flags = ["--bench_steps", "30", "--batch_size", "16", "--accelerator", "cpu", "--out", str(tmp_path)]
    done = run_program("train.py", *small_data, *flags)
    assert_ok(done)
    run = run_folder_of(tmp_path)
    metrics = metrics_of(run)
    assert metrics["steps"] == 50  # 20 to warm up
    assert metrics["test/acc"] is None
    assert not (run / "checkpoints").exists()
    assert f"{metrics['perf/images_per_second']:,.0f} images/s" in done.stdout
    assert "0.74 MB of it model states" in done.stdout


def test_the_fallback_to_digits_is_reported_everywhere(tmp_path: Path):
    data = ["--data.root", str(tmp_path / "data"), "--data.url", "http://127.0.0.1:9/cifar-10-python.tar.gz"]
    flags = ["--max_steps", "5", "--batch_size", "16", "--accelerator", "cpu", "--out", str(tmp_path / "out")]
    flags += ["--test_figures", "false", "--trainer.limit_test_batches", "1"]
    done = run_program("train.py", *data, *flags)
    assert_ok(done)
    run = run_folder_of(tmp_path / "out")
    assert run.parent.name == "net-baseline-digits-fallback"
    assert "CIFAR-10" in done.stderr
    assert "results of the embedded handwritten digits" in done.stdout
    metrics = metrics_of(run)
    assert (metrics["dataset"], metrics["num_train"], metrics["num_test"]) == ("digits", 45_000, 10_000)
    taken_out = tmp_path / "net.ckpt"  # the file itself records what it was trained on
    shutil.copyfile(run / "checkpoints" / "last.ckpt", taken_out)
    flags[1] = "8"
    done = run_program("train.py", *data, *flags, "--resume", str(taken_out))
    assert_ok(done)
    assert "is not available" not in done.stderr  # CIFAR-10 is not asked for
    assert "continues on the embedded handwritten digits" in done.stderr
    assert metrics_of(run.parent / "version_1")["dataset"] == "digits"
    done = run_program("train.py", *data, *flags, "--data.source", "cifar10")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


@pytest.mark.distributed
def test_the_sources_own_configuration(small_data: list[str], tmp_path: Path):
    """The engine gets the options of the file, and the corresponding flags are printed once."""
    file = "cifar_zero/config/deepspeed_examples.json"
    flags = ["--ds_config", file, "--devices", "2", "--accelerator", "cpu", "--log_interval", "4", "--max_steps", "8"]
    said = train_all({tmp_path: [*small_data, *flags]})
    assert len(re.findall(f"{file}: ZeRO 2; sets --gradient_clip_val 1.0 --batch_size 16", said)) == 1
    assert "cpu_offload" not in said
    run, source = run_folder_of(tmp_path), json.loads((ROOT / file).read_text())
    assert source == get_ds_config(2, "bf16")
    engine = json.loads((run / "deepspeed.json").read_text())
    for key, value in source["zero_optimization"].items():
        assert engine["zero_optimization"][key] == (None if key == "cpu_offload" else value)
    for key in ("gradient_clipping", "steps_per_print", "prescale_gradients", "wall_clock_breakdown", "fp16", "bf16"):
        assert engine[key] == (source[key] | {"check_grad_overflow": False} if key == "bf16" else source[key])


@pytest.mark.parametrize(
    ("hook", "number", "to", "devices", "length"),
    [
        pytest.param(
            *("on_train_batch_end", signal.SIGINT, "group", 2, "--epochs 5000"), marks=pytest.mark.distributed
        ),
        ("on_train_epoch_end", signal.SIGHUP, "self", 1, "--max_steps 1"),
        pytest.param("on_test_batch_start", signal.SIGTERM, "launcher", 2, "--max_steps 1", marks=LONG_ON_RANKS),
        pytest.param("on_test_batch_start", signal.SIGINT, "group", 2, "--max_steps 1", marks=LONG_ON_RANKS),
    ],
)
def test_a_signal_saves_and_prints_how_to_resume(
    hook: str, number: signal.Signals, to: str, devices: int, length: str, small_data: list[str], tmp_path: Path
):
    """It comes in mid-training, at the end of the last epoch, or during the test. A terminal sends Ctrl-C to the
    launcher and to all ranks."""
    sends = ["--trainer.callbacks", "tests.users_code.sends_signal.SendsSignal", "--trainer.callbacks.hook", hook]
    sends += ["--trainer.callbacks.number", str(number.value), "--trainer.callbacks.to", to]
    flags = ["--devices", str(devices), "--accelerator", "cpu", "--batch_size", "16", *length.split()]
    done = run_program("train.py", *small_data, *flags, *sends, "--out", str(tmp_path))
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    run = run_folder_of(tmp_path)
    step = read(run_folder.find_checkpoint(str(run)))["global_step"]
    assert f"{name}: stopped at step {step}, saved; resume with: {train_command()} --resume {run}" in done.stderr
    assert done.returncode == 128 + number
    assert "Traceback" not in done.stderr
    assert not (run / run_folder.METRICS).exists()


def test_a_signal_ends_an_evaluation(small_data: list[str], tmp_path: Path):
    own = ["--model", "tests.users_code.sends_signal:Model", "--accelerator", "cpu", "--out", str(tmp_path)]
    assert_ok(run_program("train.py", *small_data, *own, "--batch_size", "16", "--max_steps", "1"))
    done = run_program("evaluate", str(run_folder_of(tmp_path)), *own, "--model.number", "15")
    assert (done.returncode, done.stdout) == (143, ""), done.stderr
    assert done.stderr.endswith("stopped by SIGTERM\n")


@of_test_all
@pytest.mark.distributed
def test_a_full_disk_leaves_the_previous_checkpoint_intact(small_data: list[str], tmp_path: Path):
    """A checkpoint of stage 2 takes 0.8 MB. Until the next checkpoint has replaced it, both are on the disk."""
    flags = ["--strategy", "deepspeed_stage_2", "--devices", "2", "--accelerator", "cpu", "--batch_size", "16"]
    flags += ["--max_steps", "90", "--epochs", "9"]
    with small_disk(tmp_path, "1200k") as disk:
        done = run_program("train.py", *small_data, *flags, "--out", str(disk))
        assert done.returncode == 1, done.stderr[-2000:]
        assert "Traceback" not in done.stderr
        assert "last.ckpt could not be written: No space left on device. The training continues" in done.stderr
        (kept,) = [file.parent for file in disk.rglob("latest")]
        assert read(kept)["global_step"] == 36
