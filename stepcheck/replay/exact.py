"""Makes torch compute in float64, but draw random numbers in the training's dtypes, so that they are the same."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

LOW = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes that float64 replaces."""

FLOAT64_CASTS: dict[Any, Callable[..., Any]] = dict.fromkeys(
    (Tensor.half, Tensor.bfloat16, Tensor.float), lambda tensor, *args, **kwargs: tensor.double()
)
"""Maps each method that casts to one of these dtypes to a function that casts to float64 instead."""

DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d}
DRAWS = {torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.bernoulli, torch.normal, torch.multinomial}
DRAWS_IN_PLACE = {Tensor.uniform_, Tensor.normal_, Tensor.exponential_, Tensor.bernoulli_}


class Exact(TorchFunctionMode):
    """Context manager in which torch computes in float64, whatever precision the code requests.

    Random numbers are drawn in a lower precision and then converted, because generators draw different numbers in
    float64. Dropout draws in the lowest dtype of the training. Methods such as `Tensor.normal_` draw in float32, and
    functions such as `torch.rand` draw in the dtype that they are given, or else in float32. Random numbers that a
    function in C++ or CUDA draws internally, as attention with dropout does, are not handled.
    """

    def __init__(self, lowest: torch.dtype):
        """Takes the lowest dtype in which the training computes."""
        super().__init__()
        self._lowest = lowest

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUTS:
            mask = func(torch.ones_like(args[0], dtype=self._lowest, requires_grad=False), *args[1:], **kwargs)
            return args[0] * mask.double()
        if func in DRAWS_IN_PLACE:
            drawn = func(torch.empty_like(args[0], dtype=torch.float32), *args[1:], **kwargs)
            return args[0].copy_(drawn)
        if func in DRAWS:
            args, kwargs = tree_map(_to_float32, (args, kwargs))
        else:
            args, kwargs = tree_map(to_float64, (args, kwargs))
            func = FLOAT64_CASTS.get(func, func)
        return tree_map(to_float64, func(*args, **kwargs))


def to_float64(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.dtype in LOW else value
    return torch.float64 if isinstance(value, torch.dtype) and value in LOW else value


def _to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.float64 else value
