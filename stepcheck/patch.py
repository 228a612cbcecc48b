"""Wraps functions of other packages."""

from collections.abc import Callable
from functools import wraps
from typing import Any


def wrap_function(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replaces the attribute `name` of `owner`, a function, by a function that calls `wrapper` with the original
    function and the arguments of the call, and returns the wrapper's result."""
    original = getattr(owner, name)

    @wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, wrapped)
