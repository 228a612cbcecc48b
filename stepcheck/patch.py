"""Wraps functions of other packages."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any


def wrap_function(owner: Any, name: str, wrapper: Callable[..., Any]) -> Callable[[], None]:
    """Replaces the attribute `name` of `owner`, a function, by a function that calls `wrapper` with the original
    function and the arguments of the call, and returns the wrapper's result. Returns a function that takes the
    replacement back."""
    original = getattr(owner, name)
    restore = partial(setattr, owner, name, original) if name in vars(owner) else partial(delattr, owner, name)

    @wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, wrapped)
    return restore
