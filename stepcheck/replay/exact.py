"""Makes torch compute in float64, but draw random numbers in the training's dtypes, so that they are the same."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

HIGH = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64),
    torch.complex64: torch.complex128,
}
"""The dtype that replaces each lower one."""

FLOAT64_CASTS: dict[Any, Callable[..., Any]] = dict.fromkeys(
    (Tensor.half, Tensor.bfloat16, Tensor.float), lambda tensor, *args, **kwargs: tensor.double()
)
"""Maps each method that casts to one of these dtypes to a function that casts to float64 instead."""

DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d}
DRAWS = {
    *(torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.bernoulli, torch.normal, torch.multinomial),
    *(torch.poisson, Tensor.bernoulli, Tensor.multinomial),
}
DRAWS_IN_PLACE = {
    *(Tensor.uniform_, Tensor.normal_, Tensor.exponential_, Tensor.bernoulli_, Tensor.cauchy_, Tensor.log_normal_),
    *(Tensor.geometric_, Tensor.random_),
}
DRAWS_INSIDE = {F.gumbel_softmax, F.alpha_dropout, F.feature_alpha_dropout}
"""Functions that draw random numbers and compute with them."""


class Exact(TorchFunctionMode):
    """Context manager in which torch computes in float64, whatever precision the code requests.

    Random numbers are drawn in a lower precision and then converted, because generators draw different numbers in
    float64. Dropout and the functions in DRAWS_INSIDE draw in the lowest dtype of the training. Other functions draw in
    the dtype that the code names. If it is the dtype of a tensor, which is float64 here, they draw in the dtype of the
    weights, also under autocast. Random numbers that a function in C++ or CUDA draws internally, as attention with
    dropout does, are not handled.
    """

    def __init__(self, lowest: torch.dtype, weights: torch.dtype):
        """Takes the lowest dtype in which the training computes, and the dtype of its weights."""
        super().__init__()
        self._lowest, self._weights = lowest, weights

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUTS:
            mask = func(torch.ones_like(args[0], dtype=self._lowest, requires_grad=False), *args[1:], **kwargs)
            return args[0] * mask.double()
        if func in DRAWS or func in DRAWS_IN_PLACE or func in DRAWS_INSIDE:
            target = args[0] if func in DRAWS_IN_PLACE else None
            dtype = self._lowest if func in DRAWS_INSIDE else self._weights
            args, kwargs = tree_map(partial(_lowered, dtype=dtype), (args, kwargs))
            if target is not None:
                return target.copy_(func(*args, **kwargs))
        else:
            args, kwargs = tree_map(to_float64, (args, kwargs))
            func = FLOAT64_CASTS.get(func, func)
        return tree_map(to_float64, func(*args, **kwargs))


def to_float64(value: Any) -> Any:
    """Returns a tensor or a dtype in double precision if it is in a lower one, and other values as they are."""
    if isinstance(value, Tensor):
        return value.to(HIGH.get(value.dtype, value.dtype))
    return HIGH.get(value, value) if isinstance(value, torch.dtype) else value


def _lowered(value: Any, dtype: torch.dtype) -> Any:
    """Returns a float64 tensor in `dtype`, `dtype` in place of float64, and other values as they are."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype == torch.float64 else value
    return dtype if value is torch.float64 else value
