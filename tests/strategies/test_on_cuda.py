"""A strategy's choices for GPUs, tested on a machine that may have none."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

from cifar_zero.config import command_line
from cifar_zero.optimizers import OPTIMIZERS
from cifar_zero.strategies import fsdp2, hooks_of
from cifar_zero.strategies.deepspeed import ZeROStrategy
from cifar_zero.strategies.deepspeed.hooks import EngineHooks
from cifar_zero.strategies.mesh import MeshStrategy
from cifar_zero.training.build import strategy_of
from cifar_zero.training.resolve import make_run

GPU = torch.device("cuda", 0)
STRATEGIES = [SingleDeviceStrategy(GPU), DDPStrategy(parallel_devices=[GPU])]
PLAIN, BFLOAT16 = Precision(), MixedPrecision("bf16-mixed", "cuda")
SCALED = MixedPrecision("16-mixed", "cuda", torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize("made", STRATEGIES, ids=["baseline", "ddp"])
@pytest.mark.parametrize(
    ("precision", "clips", "expected"),
    [
        (PLAIN, False, "torch_fused"),
        (PLAIN, True, "torch_fused"),
        (BFLOAT16, False, "torch_fused"),
        (BFLOAT16, True, "torch"),
        (SCALED, False, "torch"),
        (SCALED, True, "torch"),
    ],
)
def test_the_optimizer_is_fused_where_lightning_takes_it(
    made: Strategy, precision: Precision, clips: bool, expected: str
):
    made.precision_plugin = precision
    assert hooks_of(made).optimizer_implementation(made.root_device.type, clips) == expected
    assert hooks_of(made).optimizer_implementation("cpu", clips) == "torch"


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tensor_parallel", "pipeline", "deepspeed_stage_2"])
def test_gpus_talk_over_the_backend_that_torch_takes_for_them(name: str):
    flags = ["--strategy", name, "--devices", "2", "--precision", "bf16-mixed"]
    made: Any = strategy_of(make_run(command_line.parse([*flags, "--accelerator", "gpu"])))
    assert made._process_group_backend is None


@pytest.mark.parametrize(
    ("name", "place"), [("", None), ("_superoffload", None), ("_offload", "cpu"), ("_offload_nvme", "nvme")]
)
def test_stage_3_keeps_its_shards_on_the_gpu_unless_they_are_offloaded(name: str, place: str | None):
    flags = ["--strategy", f"deepspeed_stage_3{name}", "--accelerator", "gpu", "--devices", "2"]
    made = strategy_of(make_run(command_line.parse([*flags, "--optimizer", "adam", "--nvme_path", "/nvme"])))
    assert made.remote_device == place  # pyright: ignore


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_zero_on_a_gpu_needs_no_compiler(name: str):
    """DeepSpeed's own Adam for a GPU is compiled at its first use, which fails on many machines."""
    implementation = hooks_of(ZeROStrategy()).optimizer_implementation("cuda", clips=True)
    made = OPTIMIZERS[name]().build([torch.nn.Parameter(torch.ones(2))], implementation)
    assert type(made).__module__.startswith("torch.optim.")
    assert made.defaults["fused"]


@pytest.mark.parametrize(("dynamic", "expected"), [(True, 1.0), (False, None)])
def test_the_loss_scale_at_stage_0(dynamic: bool, expected: float | None):
    """A run ends that overflows at the lowest scale; a scale that is given stays, and is no sign of it."""
    optimizer: Any = object.__new__(FP16_UnfusedOptimizer)  # made by an engine in float16, on a GPU only
    settings = {"dynamic_loss_scale": dynamic, "cur_scale": 1.0, "use_grad_scaling": True}
    optimizer.loss_scale_config, optimizer.custom_loss_scaler = SimpleNamespace(**settings), False
    engine = SimpleNamespace(optimizer=optimizer, fp16_enabled=lambda: True)
    assert EngineHooks(SimpleNamespace(deepspeed_engine=engine)).loss_scale() == expected


def test_fsdp_is_fsdp2():
    """Both names build torch's fully_shard, whose DTensors torch's fused SGD refuses."""
    flags = ["--accelerator", "gpu", "--devices", "2", "--precision", "bf16-mixed", "--gradient_clip_val", "1"]
    one, other = (make_run(command_line.parse([*flags, "--strategy", name])) for name in ("fsdp", "fsdp2"))
    assert replace(one.spec, summary="") == replace(other.spec, summary="")
    for made in (strategy_of(run) for run in (one, other)):
        assert isinstance(made, MeshStrategy)
        assert made._shard.func is fsdp2.shard  # pyright: ignore
        implementation = hooks_of(made).optimizer_implementation("cuda", clips=True)
        weights = [torch.nn.Parameter(torch.ones(2))]
        fused = {name: OPTIMIZERS[name]().build(weights, implementation).defaults["fused"] for name in ("sgd", "adam")}
        assert fused == {"sgd": None, "adam": True}
