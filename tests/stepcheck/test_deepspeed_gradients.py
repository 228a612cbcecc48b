"""Tests that the audit knows which gradients DeepSpeed rounds, and which it replaces."""

import importlib
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stepcheck.attach import AutoAudit
from stepcheck.auditor import audit
from stepcheck.engines import NotAuditable, adapter_of
from stepcheck.updates import torch_class


@pytest.fixture(autouse=True)
def one_rank(own_process_group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_RANK", "0")
    import deepspeed

    from stepcheck.engines.deepspeed import compile_no_collective

    compile_no_collective()
    autocast = importlib.import_module("deepspeed.runtime.torch_autocast")
    monkeypatch.setattr(autocast, "TORCH_AUTOCAST_INITIALIZED", False)  # which an engine sets for later ones too
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    deepspeed.init_distributed(verbose=False)


BATCH = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0}


def build(stage: int, model: Any = None, **config: Any) -> Any:
    """Returns an engine of a model, by default of two layers that share their weights."""
    import deepspeed

    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    model = model or nn.Sequential(layer, layer)
    config = {**BATCH, "zero_optimization": {"stage": stage}, "optimizer": optimizer("AdamW"), **config}
    initialize: Any = deepspeed.initialize  # its annotations are narrower than what it accepts
    return initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def optimizer(kind: str) -> dict[str, Any]:
    return {"type": kind, "params": {"lr": 0.01, "torch_adam": True}}


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("changed", [False, True])
def test_a_parameter_group_may_override_the_options_in_the_configuration(stage: int, changed: bool, tmp_path: Path):
    """DeepSpeed builds the optimizer, as with Accelerate's DummyOptim. A group may have an iterator of parameters."""
    import deepspeed

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    groups = [{"params": model[0].parameters(), "weight_decay": 0.5}, {"params": [*model[1].parameters()], "lr": 0.02}]
    config = {**BATCH, "zero_optimization": {"stage": stage}, "optimizer": optimizer("AdamW")}

    def initialize(*args: Any, **kwargs: Any) -> Any:
        built: Any = deepspeed.initialize(*args, **kwargs)
        for group in built[0].basic_optimizer.param_groups if changed else ():
            group["weight_decay"] = 0.1
        return built

    auto_audit = AutoAudit(str(tmp_path), keep_going=True)
    engine = auto_audit._initialize(initialize, None, model, None, groups, config=config)[0]
    engine.backward(engine(torch.randn(4, 8)).square().mean())
    engine.step()
    (verdict,) = auto_audit.verdicts
    expected = [f"weight_decay of 0.{name} is 0.1, and 0.5 was given" for name in ("weight", "bias")]
    assert [each.text for each in verdict.findings] == (expected if changed else []), str(verdict)


def train(engine: Any) -> Any:
    """Trains two steps. Returns the verdict."""
    with audit(engine, on_fault="warn", weights_every=1) as audited:
        for _ in range(2):
            engine.backward(engine(torch.randn(4, 8)).float().square().mean())
            engine.step()
    return audited.verdict


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("dtype", "scale"), [("bfloat16", 1.0), ("float16", 65536.0)])
def test_the_loss_scale_of_autocast_is_no_fault(stage: int, dtype: str, scale: float):
    engine = build(stage, torch_autocast={"enabled": True, "dtype": dtype})
    verdict = train(engine)
    assert (verdict.outcome, verdict.steps, verdict.findings) == ("agrees", 2, [])
    adapter = adapter_of(engine)
    assert adapter.loss_scale() == scale
    assert stage == 0 or adapter.rounding_dtypes() == {torch.float32, getattr(torch, dtype)}  # ZeRO may round to it


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_norm_that_contains_the_loss_scale_of_autocast_is_found(stage: int):
    """DeepSpeed clips before it divides by the scale (0.17.2 to 0.19.8; stepcheck/upstream/autocast_clipping)."""
    verdict = train(build(stage, torch_autocast={"enabled": True, "dtype": "float16"}, gradient_clipping=0.01))
    assert "step 1: all gradients together are" in str(verdict.findings[0])


@pytest.mark.parametrize("engine", [True, False])
def test_an_optimizer_of_another_model_is_found(engine: bool):
    """ZeRO 1 to 3 end with a KeyError or an AttributeError instead (DeepSpeed issue 6770)."""
    import deepspeed

    model, other = nn.Linear(8, 8), nn.Linear(8, 8)
    sgd = torch.optim.SGD(other.parameters(), lr=0.1)
    initialize: Any = deepspeed.initialize
    trained: Any = initialize(model=model, optimizer=sgd, config=BATCH)[0] if engine else model
    with audit(trained, None if engine else sgd, on_fault="warn") as audited:
        loss = trained(torch.randn(4, 8)).square().mean()
        trained.backward(loss) if engine else loss.backward()
        (trained if engine else sgd).step()
    assert "the optimizer has no weight of the module" in str(audited.verdict.findings[0])


@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_gradients_that_zero_replaces_with_the_updates_of_muon_are_not_judged(clip: float):
    zero = {"stage": 1, "reduce_scatter": False}
    verdict = train(build(1, zero_optimization=zero, optimizer=optimizer("Muon"), gradient_clipping=clip))
    assert verdict.findings == []
    assert "Muon (1 of 2" in verdict.not_judged["some gradients"]


class OnebitAdam(torch.optim.Adam):
    pass


@pytest.mark.parametrize(
    ("why", "owner", "name", "value"),
    [
        ("different parts", "", "mp_world_size", 2),  # as with autotp_size 2, which needs two ranks
        ("quantized", "_config.zero_config", "zero_quantized_gradients", True),
        ("quantized", "_config.zero_config", "zero_quantized_weights", True),
        ("quantized", "_config.zero_config", "zero_quantized_nontrainable_weights", True),
        ("ZenFlow", "_config.zero_config", "zenflow", {}),
        ("MiCS", "_config", "mics_shard_size", 2),
        ("DeepCompile", "_config.compile_config", "deepcompile", True),
        ("1-bit", "", "basic_optimizer", OnebitAdam([torch.ones(1)])),
    ],
)
def test_what_changes_gradients_or_weights_by_design_is_refused(why: str, owner: str, name: str, value: Any):
    """The options are set after the start, because they need several ranks, a GPU or an earlier release."""
    engine = build(1)
    setattr(attrgetter(owner)(engine) if owner else engine, name, value)
    with pytest.raises(NotAuditable, match=why):
        adapter_of(engine)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_that_deepspeed_skips_is_named(stage: int):
    """Plain PyTorch does not skip it, and ends with weights that are not numbers (DeepSpeed issue 8415)."""
    engine = build(stage, bf16={"enabled": True})
    with audit(engine, on_fault="warn") as audited:
        for batch in (torch.randn(4, 8), torch.full((4, 8), torch.inf)):
            engine.backward(engine(batch.bfloat16()).square().mean())
            engine.step()
    assert (audited.verdict.steps, audited.verdict.skipped, audited.verdict.findings) == (1, 1, [])
    assert "not finite" in audited.verdict.notes["skipped steps"]


class TwoOutputs(nn.Linear):
    """Returns a loss, an output whose gradient is 0 and a parameter."""

    def forward(self, x: Any) -> Any:
        value = super().forward(x)
        return value.square().mean().double(), value.sum(), self.bias


@pytest.mark.parametrize(("plain", "stage"), [(False, 0), (False, 1), (False, 3), (True, 1), (True, 2), (True, 3)])
def test_odd_outputs_are_no_fault(stage: int, plain: bool):
    engine = build(stage, TwoOutputs(8, 8), gradient_accumulation_steps=2)
    with audit(engine, on_fault="warn", weights_every=1) as audited:
        for _ in range(4):
            loss, other, bias = engine(torch.randn(4, 8))
            loss = loss + 0.0 * other + bias.sum()
            loss.backward() if plain else engine.backward(loss)
            engine.step()
    assert (audited.verdict.outcome, audited.verdict.steps) == ("agrees", 2), str(audited.verdict)
    assert not list(engine.module.bias._backward_hooks or ())[2:]


@pytest.mark.parametrize("stage", [1, 3])
def test_calls_of_the_module_itself_and_failed_backward_passes_are_no_fault(stage: int):
    engine = build(stage, gradient_accumulation_steps=2)

    def fail(gradient: Any) -> None:
        raise ValueError("the backward pass has failed")

    with audit(engine, on_fault="warn", weights_every=1) as audited:
        for number in range(4):
            batch = torch.randn(4, 8)
            if number == 1:
                output = engine(batch)
                handle = output.register_hook(fail)
                with pytest.raises(ValueError, match="has failed"):
                    engine.backward(output.square().mean())
                handle.remove()
            loss = engine(batch).square().mean()
            engine.backward(loss + engine.module(-batch).square().mean())
            engine.step()
    assert (audited.verdict.findings, audited.verdict.steps) == ([], 2)


def test_a_script_may_change_the_weights_that_the_optimizer_itself_updates():
    engine = build(0)
    with audit(engine, on_fault="warn") as audited:
        for _ in range(3):
            engine.backward(engine(torch.randn(4, 8)).square().mean())
            engine.step()
            with torch.no_grad():
                engine.module[0].weight.clamp_(-0.1, 0.1)
    assert (audited.verdict.findings, audited.verdict.steps) == ([], 3)


def test_adam_without_bias_correction_is_not_judged():
    adam = torch.optim.Adam([torch.ones(1, requires_grad=True)])
    assert torch_class(adam) is torch.optim.Adam
    adam.param_groups[0]["bias_correction"] = False  # an option of DeepSpeed's Adam
    assert torch_class(adam) is None
