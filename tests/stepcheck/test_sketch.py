"""Sketches are linear, and their rounding is what the tolerances assume."""

import itertools

import pytest
import torch

from stepcheck.bounds import SKETCH_EPS
from stepcheck.sketch import PERIOD, WIDTH, K, project


def normal(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("size", [1, 5, WIDTH - 1, WIDTH, 3 * WIDTH + 7, 300 * WIDTH + 11])
def test_sketches_of_the_parts_add_up(size: int, exact: bool, dtype: torch.dtype):
    values = normal(size).to(dtype)
    cuts = sorted({0, size // 3, size // 2, size - 1, size})
    parts = sum(
        (project(values[a:b], a, exact) for a, b in itertools.pairwise(cuts)),
        torch.zeros(K + 1, dtype=torch.float64),
    )
    tolerance = 1e-12 if exact else 6 * SKETCH_EPS
    assert (parts - project(values.double(), exact=True))[:K].abs().max() <= tolerance * values.double().norm()


def test_signs_go_on_where_the_period_of_the_rows_ends():
    values, start = normal(4 * WIDTH), (PERIOD - 2) * WIDTH
    parts = project(values[: 2 * WIDTH], start, True) + project(values[2 * WIDTH :], start + 2 * WIDTH, True)
    assert torch.allclose(parts[:K], project(values, start, True)[:K], rtol=1e-12, atol=0)
    assert torch.equal(project(values[2 * WIDTH :], start + 2 * WIDTH, True), project(values[2 * WIDTH :], 0, True))


def test_rounding_of_a_sketch_is_as_assumed():
    errors = []
    for seed in range(6):
        values = normal(1000 * WIDTH, seed)
        errors.append((project(values) - project(values[1:], 1) - project(values[:1]))[:K] / values.norm())
    deviation = float(torch.stack(errors).square().mean().sqrt())
    assert SKETCH_EPS / 2 < deviation < SKETCH_EPS


def test_the_norm_is_estimated_from_the_rows():
    values = normal(300 * WIDTH)
    assert float(project(values)[K].sqrt()) == pytest.approx(float(values.norm()), rel=0.02)
    assert float(project(values, measure=True)[K].sqrt()) == pytest.approx(float(values.double().norm()), rel=1e-5)
    assert float(project(values[:100])[K].sqrt()) == pytest.approx(float(values[:100].norm()), rel=1e-6)
