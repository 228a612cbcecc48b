"""Random projections ("sketches") of tensors.

A sketch of a tensor is K sums of its elements with random signs. It is linear: the sketches of the shards of a tensor
add up to the sketch of the tensor, and the sketch of a mean over ranks is the mean of the sketches. So a sharded tensor
can be compared with an unsharded one without gathering either.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

ROW_SIGNS, COLUMN_SIGNS = 4, 2

K = ROW_SIGNS * COLUMN_SIGNS
"""Numbers in a sketch."""

WIDTH = 4096
"""Elements in a row. A tensor is projected as a matrix with rows of this length."""

PERIOD = 65537
"""Number of rows after which the signs repeat. It is prime, so that it is no multiple of a layer's size."""

BLOCK = 16
"""Rows that are added in one pass. On a CPU, a block and the sums of up to eight blocks are added in float32, unless
`project` is to be exact. Longer sums are added in float64, so that a sketch loses little precision."""

CHUNK_ROWS = {"cpu": 128}
"""Rows that are projected at a time, by device type. On a CPU they fit into the cache."""

OTHER_CHUNK_ROWS = 1024


@cache
def _signs(device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the signs of rows, float32 (ROW_SIGNS, PERIOD + OTHER_CHUNK_ROWS), and of columns, float64 (K, WIDTH)."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(0, 2, (ROW_SIGNS, PERIOD), generator=generator, device="cpu").float() * 2 - 1
    columns = torch.randint(0, 2, (K, WIDTH), generator=generator, device="cpu").double() * 2 - 1
    return torch.cat([rows, rows[:, :OTHER_CHUNK_ROWS]], 1).to(device), columns.to(device)


def dense(tensor: Tensor) -> Tensor:
    """Returns a tensor that is neither sparse nor complex. Of a complex tensor, the real and imaginary parts become a
    last dimension of size 2."""
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def project(values: Tensor, start: int = 0, exact: bool = False, measure: bool = False) -> Tensor:
    """Returns the sketch of a part of a tensor, and the squared norm of this part: float64 (K + 1,).

    Args:
        values: The part, of any floating or complex dtype and shape, contiguous in the flattened tensor.
        start: Position of the part in the flattened tensor, in elements.
        exact: Whether to compute in float64, for values that must agree to the last bit. Otherwise a CPU adds up to
            128 rows in float32 (see BLOCK). Other devices always compute in float64, because their float32 may be TF32.
        measure: Whether to compute the squared norm. Otherwise it is estimated from the sums of rows, to about one
            percent for a tensor of more than one row.
    """
    start = 2 * start if values.is_complex() else start
    flat = dense(values.detach()).reshape(-1)
    device = flat.device
    dtype = torch.float32 if device.type == "cpu" and not exact else torch.float64
    rows, columns = _signs(device)
    sketch = torch.zeros(K + 1, dtype=torch.float64, device=device)
    size = flat.numel()
    head = min(-start % WIDTH, size)
    body = (size - head) // WIDTH
    for first, last in ((0, head), (head + body * WIDTH, size)):
        if first < last:
            column, row = (start + first) % WIDTH, (start + first) // WIDTH % PERIOD
            part = flat[first:last].double()
            sums = columns[:, column : column + last - first] @ part
            sketch[:K] += (sums.view(ROW_SIGNS, -1) * rows[:, row, None]).view(-1)
            sketch[K] += part.dot(part)
    if body:
        matrix = flat[head : head + body * WIDTH].view(body, WIDTH)
        sums, square = _sum_rows(matrix, (start + head) // WIDTH, dtype, measure)
        sketch[:K] += torch.bmm(columns.view(ROW_SIGNS, COLUMN_SIGNS, WIDTH), sums[..., None]).view(-1)
        sketch[K] += square if measure else sums.view(-1).dot(sums.view(-1)) / ROW_SIGNS
    return sketch


def _sum_rows(matrix: Tensor, row: int, dtype: torch.dtype, measure: bool) -> tuple[Tensor, Tensor | float]:
    """Returns the sums over the rows with each of the row signs, float64 (ROW_SIGNS, WIDTH), and the squared norm, or 0
    unless `measure` is true. The first row of the matrix is row number `row` of the whole tensor."""
    signs = _signs(matrix.device)[0]
    chunk = CHUNK_ROWS.get(matrix.device.type, OTHER_CHUNK_ROWS)
    total: Any = 0.0
    square: Any = 0.0
    for part in matrix.split(chunk):
        own, part = signs[:, row % PERIOD : row % PERIOD + len(part)].to(dtype), part.to(dtype)
        full = len(part) // BLOCK * BLOCK
        if full:
            blocks = own[:, :full].view(ROW_SIGNS, -1, BLOCK).transpose(0, 1)
            total = total + torch.bmm(blocks, part[:full].view(-1, BLOCK, WIDTH)).sum(0).double()
        if full < len(part):
            total = total + (own[:, full:] @ part[full:]).double()
        if measure:
            square = square + torch.linalg.vector_norm(part).double().square()
        row += len(part)
    return total, square
