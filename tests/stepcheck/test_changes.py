"""Tests what an audit compares with the model as it was given: modules, and the counts of batch norms."""

from typing import Any

import torch
from torch import nn

from stepcheck.auditor import audit
from stepcheck.bounds import factor_tolerance
from stepcheck.start import Start


def step(engine: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    engine(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def uncount(module: Any, inputs: object, output: object) -> None:
    module.num_batches_tracked.data -= 1  # behind autograd: the version stays


def test_a_module_that_an_engine_has_changed_is_found():
    dropout = nn.Dropout(0.5)
    model = nn.Sequential(nn.Linear(3, 3), dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = Start(model, optimizer)
    dropout.p = 0.1
    with audit(model, optimizer, on_fault="warn", start=start) as audited:
        step(model, optimizer)
    assert str(audited.verdict.findings[0]) == "step 0: building the engine has changed 1.p (rank 0)"


def test_a_batch_norm_that_keeps_its_statistics_is_found_at_the_first_step_but_not_one_that_is_loaded():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with audit(model, optimizer, on_fault="warn") as audited:
        step(model, optimizer)
        loaded = {name: value + 5 for name, value in model.state_dict().items()}
        model.load_state_dict(loaded)
        step(model, optimizer)
        assert audited.verdict.findings == []
    with audit(model, optimizer, on_fault="warn") as audited:
        model[1].register_forward_hook(uncount)
        step(model, optimizer)
    assert str(audited.verdict.findings[0]).startswith("step 1: the batch norm 1 has not counted")


def test_a_divisor_that_float32_rounds_is_no_fault():
    for ranks in range(1, 100):
        factor = torch.tensor(1 / ranks, dtype=torch.float32).double().item() * ranks
        assert abs(factor - 1) <= factor_tolerance(strength=1e30, ranks=ranks)


def test_an_option_that_json_gives_as_a_list_is_no_fault():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.8, 0.999))
    start = Start(model, optimizer)
    optimizer.param_groups[0]["betas"] = [0.8, 0.999]
    with audit(model, optimizer, on_fault="warn", start=start) as audited:
        step(model, optimizer)
    assert audited.verdict.findings == []
