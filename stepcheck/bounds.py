"""Derives the tolerances of the audit from arithmetic. No tolerance is measured on the training that it judges.

**Gradients.** Autograd's gradients g_1 ... g_n of a parameter (n = micro-batches on a rank) are added on each rank, and
the sums of R ranks are averaged. Each of these n + R operations rounds each element once, in a dtype with unit roundoff
u = eps / 2. The rounding error of one element is about uniform in +-u times its size, so its standard deviation is at
most u * size / sqrt(3). The size of a partial sum is at most the sum of the sizes of its summands. Rounding errors of
different elements are independent of the random signs of a sketch. So each number of the sketch of the error has about
a normal distribution with mean 0 and standard deviation at most

    u * sqrt((n + R) / 3) * S,    S = mean over the ranks of (|g_1| + ... + |g_n|)

where |g| is the Euclidean norm of g. The variance of the sketch's rounding (SKETCH_EPS) is added. The tolerance is
SIGMAS standard deviations. The formula uses S instead of the norm of the result, because gradients may cancel. The
audit starts from the gradients that autograd returned, so TF32, other kernels, compilation and atomic additions change
nothing.

Below the smallest normal number of the dtype, all numbers have the same distance d (in float16, 6e-8 below 6e-5), and
an operation rounds an element by up to d / 2. For N elements this adds (n + R) / 3 * N * (d / 2)^2 to the variance. The
gradients are rounded while they have the loss scale as a factor, so this term is divided by its square.

**One factor for all gradients.** The factor that fits all sketches best, weighted by their standard deviations, has the
standard deviation 1 / |signal|. The signal is the vector of all expected numbers, each divided by its standard
deviation. Engines multiply by constants in float32, such as 1 / R or 1 / loss scale. A constant that is not a power of
two is rounded, which changes all gradients by the same factor.

**Clipping** multiplies all gradients by one factor. The factor is 1, or makes the norm over all shards equal the limit.

**Weights.** The weights that a forward pass uses are the optimizer's weights, cast. Casting is deterministic, so the
tolerance EXACT covers only the float64 rounding of two sketches.

**Updates.** torch's optimizer repeats the update in the same dtype. A different order of float32 operations changes an
update by a few eps. DeepSpeed's Adam on the CPU keeps 1 - beta2 in float32, which changes it by up to 6e-5 (DeepSpeed
0.19.8, csrc/adam/cpu_adam_impl.cpp). Writing the weight rounds it once.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from stepcheck.sketch import WIDTH

SIGMAS = 6.0
"""Standard deviations that a tolerance allows. A normal number exceeds 6 of them once in 5e8."""

SKETCH_EPS = 1.5e-7
"""Standard deviation of the difference between two float32 sketches of one tensor, as a share of its norm: each adds
blocks of 16 rows and then up to 8 blocks in float32, and each addition rounds by at most 6e-8. 1.4e-7 was measured for
normal numbers (tests/stepcheck/test_sketch.py). Tensors of less than a row are sketched in float64."""

EXACT = 1e-12
"""Relative error of a sketch in float64: some 1e4 additions that each round by 1e-16."""

UPDATE = 1e-4
"""Largest relative error of a correct update or optimizer state."""

CLIPPING = 1e-3
"""Largest relative error of a clipped norm, because engines add 1e-6 to the norm by which they divide. Two roundings in
the optimizer's dtype are allowed in addition, of the norm and of the factor."""

CANCELLATION = 1e-3
"""The relative error of a gradient is its error, divided by the sum of its norm and this share of the norm of all
gradients. A gradient that nearly cancels still has the rounding error of its summands."""


def factor_tolerance(strength: float, constants: Iterable[float]) -> float:
    """Returns the largest allowed |factor - 1|, where `factor` is the one that all gradients have in common.

    Args:
        strength: Norm of the signal, as the module's docstring defines it.
        constants: Numbers by which engines may multiply or divide all gradients, such as the number of ranks. At most
            two factors come from each of them, one before and one after the sum over the ranks. They are rounded to
            float32, unless the number is a power of two.
    """
    rounded = [each for each in constants if math.frexp(each)[0] != 0.5]
    return SIGMAS / strength + len(rounded) * torch.finfo(torch.float32).eps


def unit_roundoff(dtypes: Iterable[torch.dtype]) -> float:
    return max(torch.finfo(dtype).eps for dtype in dtypes) / 2


def underflow(dtypes: Iterable[torch.dtype]) -> float:
    """Returns the largest error by which some floating dtypes round a number below their smallest normal number."""
    return max(torch.finfo(dtype).tiny * torch.finfo(dtype).eps for dtype in dtypes) / 2


def gradient_deviation(
    summands: Tensor, sizes: Tensor, unit: float, smallest: float, micro_batches: int, ranks: int
) -> Tensor:
    """Returns the standard deviation of the numbers in the sketch of each gradient's error, float64 (parameters,).

    Args:
        summands: S of each parameter, as the module's docstring defines it, float64 (parameters,).
        sizes: Number of elements of each parameter.
        unit: Unit roundoff of the lowest dtype in which gradients are added or sent.
        smallest: The largest rounding error of an element near 0, as `underflow` returns it, without the loss scale.
        micro_batches: Number of micro-batches that each rank accumulates.
    """
    operations = (micro_batches + ranks) / 3
    of_sketches = SKETCH_EPS * (sizes >= WIDTH)
    relative = (operations * unit**2 + of_sketches.square()).sqrt() * summands.clamp(min=1e-30)
    return torch.hypot(relative, smallest * (operations * sizes).sqrt())
