"""A model learns the digits on one GPU, also with experts under each strategy that has them, compiled, and as a CUDA
graph. test_audit_on_gpu.py compares each step of every strategy with plain PyTorch."""

from pathlib import Path

import pytest

from cifar_zero.config.strategy_specs import STRATEGIES
from tests.support.helpers import assert_ok, losses, metrics_of, needs_gpu, run_folder_of, run_program

pytestmark = needs_gpu

PRECISIONS = ["32-true", "bf16-mixed", "16-mixed"]
ALL = [(strategy, precision) for strategy in ("baseline", "deepspeed_stage_2") for precision in PRECISIONS]
IN_FLOAT16 = ("ddp", "deepspeed_stage_1", "deepspeed_stage_3", "deepspeed_stage_3_offload")
IN_BFLOAT16 = ("ddp", "deepspeed_stage_3", "fsdp", "fsdp2", "pipeline", "tensor_parallel")


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Returns flags for the digits, which are rendered once for all tests."""
    root = tmp_path_factory.mktemp("digits")
    return ["--devices", "1", "--data.source", "digits", "--data.root", str(root), "--data.val_fraction", "0"]


def assert_learned(run: Path, loss: float, accuracy: float) -> None:
    """Checks the mean loss of the last 20 steps (chance: ln 10 = 2.30) and the test accuracy (chance: 0.1)."""
    assert sum([*losses(run).values()][-20:]) / 20 < loss
    assert metrics_of(run)["test/acc"] > accuracy


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [*ALL, *((name, "16-mixed") for name in IN_FLOAT16), *((name, "bf16-mixed") for name in IN_BFLOAT16)],
)
def test_learns(strategy: str, precision: str, digits: list[str], tmp_path: Path):
    """A transformer needs more steps."""
    model = "vit_tiny" if STRATEGIES[strategy].one_replica else "net"
    flags = ["--strategy", strategy, "--precision", precision, "--model", model, "--gradient_clip_val", "1"]
    flags += ["--optimizer", "adam", "--optimizer.lr", "0.0005" if model == "vit_tiny" else "0.003"]
    flags += ["--batch_size", "64", "--max_steps", "1500" if model == "vit_tiny" else "200", "--out", str(tmp_path)]
    assert_ok(run_program("train.py", *digits, *flags))
    metrics = metrics_of(tmp_path)
    assert (metrics["accelerator"], metrics["precision"]) == ("gpu", precision)
    assert_learned(tmp_path, *((2.1, 0.2) if model == "vit_tiny" else (1.8, 0.4)))


@pytest.mark.parametrize(("strategy", "precision"), [*ALL, ("deepspeed_stage_0", "32-true")])
@pytest.mark.parametrize(("model", "batch_size", "steps"), [("net_moe", 64, 500), ("vit_moe", 16, 12)])
def test_mixtures_of_experts(
    model: str, batch_size: int, steps: int, strategy: str, precision: str, digits: list[str], tmp_path: Path
):
    """All experts are on one GPU. In float32, cifar-zero evaluate finds about the same test loss as the run's own test.
    The small model also learns, but the transformer has too few steps."""
    flags = ["--strategy", strategy, "--precision", precision, "--model", model, "--model.num_experts", "[4]"]
    flags += ["--optimizer", "adam", "--batch_size", str(batch_size), "--max_steps", str(steps)]
    flags += ["--gradient_clip_val", "1", "--out", str(tmp_path)]
    assert_ok(run_program("train.py", *digits, *flags))
    run = run_folder_of(tmp_path)
    if model == "net_moe":
        assert_learned(run, 1.8, 0.4)
    done = run_program("evaluate", str(run))
    assert_ok(done)
    assert float(done.stdout.split("test loss")[1]) == pytest.approx(metrics_of(run)["test/loss"], rel=0.02)


@pytest.mark.parametrize("switch", ["--compile", "--cuda_graphs"])
@pytest.mark.parametrize("strategy", ["baseline", "ddp", "deepspeed_stage_0", "deepspeed_stage_2"])
def test_compiled_and_as_graphs(switch: str, strategy: str, small_data: list[str], tmp_path: Path):
    flags = ["--devices", "1", "--strategy", strategy, "--optimizer", "adam", "--batch_size", "16", "--max_steps", "40"]
    losses = []
    for extra in ([], [switch]):
        out = tmp_path / "-".join(["out", *extra])
        assert_ok(run_program("train.py", *small_data, *flags, *extra, "--out", str(out)))
        losses.append(metrics_of(out)["test/loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
