"""Tests that the audit knows which gradients DeepSpeed rounds, and which it replaces."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stepcheck.auditor import audit
from stepcheck.engines import NotAuditable, adapter_of


@pytest.fixture(autouse=True)
def one_rank(own_process_group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_RANK", "0")
    import deepspeed

    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)  # would be compiled
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    deepspeed.init_distributed(verbose=False)


def build(**config: Any) -> Any:
    """Returns an engine of two layers that share their weights."""
    import deepspeed

    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, layer)
    initialize: Any = deepspeed.initialize  # its annotations are narrower than what it accepts
    return initialize(model=model, model_parameters=model.parameters(), config={**BATCH, **config})[0]


BATCH = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0}


def optimizer(kind: str) -> dict[str, Any]:
    return {"type": kind, "params": {"lr": 0.01, "torch_adam": True}}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_may_round_gradients_to_the_dtype_of_autocast(stage: int):
    autocast = {"enabled": True, "dtype": "bfloat16"}
    engine = build(zero_optimization={"stage": stage}, torch_autocast=autocast, optimizer=optimizer("AdamW"))
    assert adapter_of(engine).rounding_dtypes() == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_gradients_that_zero_replaces_with_the_updates_of_muon_are_not_judged(clip: float):
    zero = {"stage": 1, "reduce_scatter": False}
    engine = build(zero_optimization=zero, optimizer=optimizer("Muon"), gradient_clipping=clip)
    with audit(engine, on_fault="warn", weights_every=1) as audited:
        for _ in range(2):
            engine.backward(engine(torch.randn(4, 8)).square().mean())
            engine.step()
    assert audited.verdict.findings == []
    assert "Muon (1 of 2" in audited.verdict.not_judged["some gradients"]


def test_tensor_parallelism_is_refused():
    engine = build(zero_optimization={"stage": 1}, optimizer=optimizer("AdamW"))
    engine.mp_world_size = 2  # as with autotp_size 2, which needs two ranks
    with pytest.raises(NotAuditable, match="different parts"):
        adapter_of(engine)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_that_deepspeed_skips_is_named(stage: int):
    """Plain PyTorch does not skip it, and ends with weights that are not numbers (DeepSpeed issue 8415)."""
    engine = build(zero_optimization={"stage": stage}, bf16={"enabled": True}, optimizer=optimizer("AdamW"))
    with audit(engine, on_fault="warn") as audited:
        for batch in (torch.randn(4, 8), torch.full((4, 8), torch.inf)):
            engine.backward(engine(batch.bfloat16()).square().mean())
            engine.step()
    assert (audited.verdict.steps, audited.verdict.skipped, audited.verdict.findings) == (1, 1, [])
    assert "not finite" in audited.verdict.notes["skipped steps"]
