"""Batches that ranks share or that repeat, and dropout that repeats, are noted; they are no faults."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from stepcheck import audit
from stepcheck.batches import Batches
from stepcheck.engines.adapter import RankInfo


def notes_of(batch: Callable[[int], Tensor], seed_of: Callable[[int], int] | None = None) -> dict[str, str]:
    """Trains three steps of two micro-batches. Returns the verdict's notes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
