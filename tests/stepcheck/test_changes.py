"""Tests what an audit compares with the model as it was given (modules, and the counts of batch norms), and what it
notes: batches that ranks share or that repeat, and dropout that repeats."""

import copy
import json
import math
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepcheck import Replay, audit, sketch
from stepcheck.attach import AutoAudit
from stepcheck.batches import Batches
from stepcheck.bounds import factor_tolerance
from stepcheck.engines import adapter_of
from stepcheck.engines.adapter import RankInfo, same_values
from stepcheck.hooks import Hooks
from stepcheck.judge import COLUMNS, Judge, Step
from stepcheck.launch.launcher import result_of
from stepcheck.start import Start
from stepcheck.verdict import Verdict


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(batch: Tensor, module: nn.Module) -> Tensor:
    return module(batch).square().sum()


def step(engine: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor | None = None) -> None:
    loss_of(torch.randn(4, 3) if batch is None else batch, engine).backward()
    optimizer.step()
    optimizer.zero_grad()


def uncount(module: Any, inputs: object, output: object) -> None:
    module.num_batches_tracked.data -= 1  # behind autograd: the version stays


def test_a_module_that_an_engine_has_changed_is_found():
    linear: Any = nn.Linear(3, 3)
    linear.unknown = math.nan  # stays the same
    dropout = nn.Dropout(0.5)
    model = nn.Sequential(linear, dropout)
    optimizer = sgd(model)
    start = Start(model, optimizer)
    dropout.p = 0.1
    with audit(model, optimizer, on_fault="warn", start=start) as audited:
        step(model, optimizer)
    assert str(audited.verdict.findings[0]) == "step 0: building the engine has changed 1.p (rank 0)"


def test_a_batch_norm_that_keeps_its_statistics_is_found_but_not_one_that_is_loaded():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = sgd(model)
    with audit(model, optimizer, on_fault="warn") as audited:
        step(model, optimizer)
        loaded = {name: value + 5 for name, value in model.state_dict().items()}
        model.load_state_dict(loaded)
        step(model, optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        assert audited.verdict.findings == []
        model[1].register_forward_hook(uncount)
        step(model, optimizer)
    assert str(audited.verdict.findings[0]).startswith("step 3: the batch norm 1 has not counted")


def test_loading_a_part_that_is_not_trained_keeps_the_comparison_with_the_last_update():
    online, target = nn.Linear(3, 3), nn.Linear(3, 3)
    model = nn.Sequential(online, target)
    optimizer = torch.optim.SGD(online.parameters(), lr=0.1)
    with audit(model, optimizer) as audited:
        step(model, optimizer)
        target.load_state_dict(online.state_dict())
        with torch.no_grad():
            online.weight.mul_(2)
        step(model, optimizer)
    assert "weights or optimizer state that change between steps" in audited.verdict.notes


def test_an_audit_ends_when_a_cuda_graph_is_recorded_and_none_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    auto_audit = AutoAudit(str(tmp_path))
    model = nn.Linear(3, 3)
    optimizer = sgd(model)
    with audit(model, optimizer) as audited:
        step(model, optimizer)
        with monkeypatch.context() as recording:
            for name in ("is_initialized", "is_current_stream_capturing"):
                recording.setattr(torch.cuda, name, lambda: True)
            with torch.no_grad():
                model(torch.randn(4, 3))  # may be recorded for evaluations
            assert not audited.stopped
            step(model, optimizer)
            auto_audit.pending[optimizer] = False
            auto_audit.before_step(optimizer)
            auto_audit.before_forward(model, ())
        step(model, optimizer)
    assert (auto_audit.verdicts, auto_audit.refused) == ([], [])
    verdict = audited.verdict
    assert (verdict.steps, verdict.outcome) == (1, "not judged")
    assert verdict.not_judged == {"step 2 and later steps": "a CUDA graph replays them, without the hooks of the audit"}


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="torch without CUDA")
def test_an_audited_module_can_become_a_cuda_graph(tmp_path: Path):
    model = nn.Linear(3, 3)
    optimizer = sgd(model)
    auto_audit = AutoAudit(str(tmp_path))
    auto_audit.audit(model, optimizer)
    step(model, optimizer)
    with suppress(RuntimeError):  # without a GPU, which torch needs after it has looked for hooks
        auto_audit._make_cuda_graphs(torch.cuda.make_graphed_callables, model, (torch.randn(4, 3),))
    step(model, optimizer)
    (verdict,) = auto_audit.verdicts
    assert (verdict.steps, verdict.outcome) == (1, "not judged")
    assert "a part of the model becomes a CUDA graph" in verdict.not_judged["step 2 and later steps"]


def test_a_divisor_that_float32_rounds_is_no_fault():
    for number in (*range(1, 100), 1000.0, 2 / 3):
        factor = torch.tensor(1 / number, dtype=torch.float32).double().item() * number
        assert abs(factor - 1) <= factor_tolerance(strength=1e30, constants=(1.0, number))


def test_a_loss_scale_whose_reciprocal_float32_rounds_is_no_fault():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=1000.0)
    with audit(model, optimizer) as audited:
        scaler.scale(model(torch.randn(4, 8)).square().sum()).backward()
        scaler.step(optimizer)
    assert audited.verdict.steps == 1


def test_a_weight_that_is_not_finite_hides_no_other():
    model, verdict = nn.Linear(3, 3), Verdict()
    judge = Judge(adapter_of(model, sgd(model)), verdict)
    sums = {name: torch.ones(2, width, dtype=torch.float64) for name, width in COLUMNS.items()}
    sums["reference"][0] = sums["used"][0] = math.inf
    sums["used"][1] = 1.5
    judge.weights(Step(1, 1, 1.0, sums, torch.zeros(1)))
    assert str(verdict.findings[0]).startswith("step 1: the weight bias is used with another value")


def test_the_default_device_of_a_script_is_not_the_device_of_the_audit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sketch, "_signs", cache(sketch._signs.__wrapped__))
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch, default = torch.randn(4, 3), torch.get_default_device()
    torch.set_default_device("meta")  # stands for a GPU
    try:
        with audit(model, optimizer) as audited:
            for _ in range(3):
                model(batch).square().sum().backward()
                optimizer.step()
    finally:
        torch.set_default_device(default)
    assert (audited.verdict.outcome, audited.verdict.steps, audited.error) == ("agrees", 3, "")


def test_the_audit_of_an_optimizer_that_is_dropped_ends():
    model = nn.Linear(3, 3)
    for _ in range(3):
        optimizer = sgd(model)
        audit(model, optimizer)
        step(model, optimizer)
    assert len(model._forward_pre_hooks) == 1


def test_an_option_that_json_gives_as_a_list_is_no_fault():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.8, 0.999))
    start = Start(model, optimizer)
    optimizer.param_groups[0]["betas"] = [0.8, 0.999]
    with audit(model, optimizer, on_fault="warn", start=start) as audited:
        step(model, optimizer)
    assert audited.verdict.findings == []


@pytest.mark.parametrize("every", [1, 2, 3, 10])
@pytest.mark.parametrize("weights_every", [1, 3, 8])
def test_every_weight_has_its_turn(every: int, weights_every: int):
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)))
    optimizer = sgd(model)
    with audit(model, optimizer, every=every, weights_every=weights_every) as audited:
        compared = set()
        for number in range(1, every * weights_every + 1):
            if number % every == 0:
                compared |= {*audited._in_turn}
            step(model, optimizer)
    assert audited.verdict.steps == weights_every
    assert compared == {*range(10)}


@pytest.mark.parametrize(
    "failing",
    [[(Judge, "gradients")], [(Judge, "gradients"), (RankInfo, "all_gather")], [(Hooks, "watch_gradients")]],
    ids=["judge", "judge and communication", "hook"],
)
@pytest.mark.parametrize("every", [1, 2])
def test_an_error_of_the_audit_itself_does_not_end_the_training(
    failing: list[tuple[type, str]], every: int, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> None:
        raise ZeroDivisionError("ours")

    model = nn.Linear(3, 3)
    optimizer, replays = sgd(model), failing[0][0] is Hooks
    plain = Replay(copy.deepcopy(model), every=every) if replays else None
    with audit(model, optimizer, every=every, replay=plain) as audited:
        for number in range(1, 10):
            if number == 3:
                for owner, name in failing:
                    monkeypatch.setattr(owner, name, fail)
            batch = torch.randn(4, 3)
            if plain:
                plain.micro_batch(partial(loss_of, batch))
            step(model, optimizer, batch)
    verdict, end = audited.verdict, 4 if every == 2 else 3
    assert verdict.not_judged.pop(f"step {end} and later steps") == "the audit failed: ZeroDivisionError: ours"
    # The other ranks replay this step, so this one must take part.
    assert {*verdict.not_judged} == ({f"the replay of step {end}"} if replays else set())
    assert (verdict.steps, verdict.outcome) == (2 // every, "not judged")


def test_a_verdict_is_json():
    verdict = Verdict()
    verdict.add(1, "gradient", math.inf, "one")
    verdict.add(1, "weight", math.nan, "another")
    json.dumps(verdict.as_dict(), allow_nan=False)
    assert verdict.as_dict()["findings"][1]["share"] > 1


def test_a_case_of_which_little_was_judged_does_not_agree():
    verdict = Verdict(steps=4, values=8, values_in_all=10)
    result = result_of("a case", {**verdict.as_dict(), "took": 1.0}, 4)
    assert (result["outcome"], result["summary"]) == (
        "not judged",
        "less than 90% of the gradients' values were judged",
    )


@pytest.mark.parametrize(("judged", "text"), [(100_000, "all"), (99_996, "0.9999"), (90_000, "0.9"), (0, "0")])
def test_a_verdict_says_how_many_of_all_values_it_has_judged(judged: int, text: str):
    verdict = Verdict(steps=1, values=judged, values_in_all=100_000)
    assert f"; 100,000 gradient values, {text} of them judged" in str(verdict)


def test_nan_equals_nan():
    values = torch.tensor([1.0, math.nan])
    assert same_values(values, values.double())
    assert not same_values(values, torch.tensor([math.nan, 1.0]))
    assert not same_values(values, torch.zeros(3))


def notes_of(batch: Callable[[int], Tensor], seed_of: Callable[[int], int] | None = None) -> dict[str, str]:
    """Trains three steps of two micro-batches. Returns the verdict's notes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = sgd(model)
    with audit(model, optimizer) as audited:
        for step in range(3):
            for part in range(2):
                if seed_of:
                    torch.manual_seed(seed_of(2 * step + part))
                model(batch(2 * step + part)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert audited.verdict.passed
    return audited.verdict.notes


DRAWN = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("batch", "seed_of", "expected"),
    [
        (lambda number: DRAWN[number], None, {}),
        (lambda number: DRAWN[number % 2], None, {"batches": "step 3 had the batch of the step before"}),
        (lambda number: DRAWN[number], lambda number: number, {}),
        (
            lambda number: DRAWN[number],
            lambda number: number // 2,
            {"random numbers": "the micro-batches of step 3 draw the same, so their dropout is the same"},
        ),
    ],
    ids=["healthy", "repeated batches", "seeded each time", "repeated dropout"],
)
def test_what_repeats_is_noted(batch, seed_of, expected: dict[str, str]):
    assert notes_of(batch, seed_of) == expected


def in_layouts() -> dict[str, Tensor]:
    """Returns a tensor in each layout of torch that is not strided, and a nested tensor that is."""
    parts, matrix = [*DRAWN[0].split([1, 3])], torch.eye(4)
    return {
        "jagged": torch.nested.nested_tensor(parts, layout=torch.jagged),
        "nested": torch.nested.nested_tensor(parts),
        **{kind: getattr(matrix, f"to_sparse{kind}")() for kind in ("", "_csr", "_csc")},
    }


@pytest.mark.filterwarnings("ignore:.*(Sparse|prototype).*")
@pytest.mark.parametrize("layout", ["jagged", "nested", "", "_csr", "_csc"])
def test_a_batch_may_have_any_layout(layout: str):
    batches = Batches(RankInfo(0, 1))
    batches.before_forward(((in_layouts()[layout],), {}))
    assert not batches.notes(1, batches.fingerprints)
    resume = pytest.importorskip("stepcheck.lightning.resume", reason="needs Lightning")
    assert resume._checksum(in_layouts()[layout]) == resume._checksum(in_layouts()[layout])


def test_ranks_with_one_batch_are_noted():
    ranks = [Batches(RankInfo(rank, 3)) for rank in range(3)]
    for rank, own in zip(ranks, (0, 1, 0), strict=True):
        rank.before_forward(((DRAWN[own],), {}))
    everyone = torch.stack([rank.fingerprints for rank in ranks]).sum(0)
    assert ranks[1].notes(1, everyone) == {"batches": "ranks 0 and 2 had the same batch in step 1"}
