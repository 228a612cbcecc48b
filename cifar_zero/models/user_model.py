"""Adds a model in the user's own code to the registry of models."""

# There are no postponed annotations here, because jsonargparse would import torch (see TYPE_CHECKING) to resolve them.
import inspect
from collections.abc import Callable
from copy import deepcopy
from dataclasses import field, make_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from cifar_zero.core.errors import UsageError
from cifar_zero.core.plain_data import Plain, is_plain
from cifar_zero.models import MODELS, ThirdParty
from stepcheck.lightning import user_code

if TYPE_CHECKING:
    from torch import nn


class UserModel(ThirdParty):
    """A model in the user's own code. Its fields are the options that `register_user_model` makes from the arguments of
    the class or function that builds the model. Their values are not checked against limits."""

    may_need_values = True
    make: ClassVar[Callable[..., Any]]
    takes_classes: ClassVar[bool]

    def __post_init__(self) -> None:
        pass

    def build(self, num_classes: int) -> "nn.Module":
        from cifar_zero.models.external import built

        options = {**vars(self)}
        if self.takes_classes:
            options["num_classes"] = num_classes
        return built(partial(type(self).make, **options))


def register_user_model(name: str) -> None:
    """Adds a model of the user to the registry: the class or function FILE.py:NAME or PACKAGE.MODULE:NAME, which makes
    a module that maps images (N, 3, H, W) to scores (N, classes). Only the command line may name it, because loading it
    runs code.

    An argument becomes an option if its default is a bool, number, string, list, tuple, dict or None. `num_classes`
    receives the number of classes. Raises UsageError if the model cannot be imported, or if an argument other than
    `num_classes`, *args and **kwargs has no default or is called `name`.
    """
    make = user_code.load(name, "--model")
    arguments = dict(inspect.signature(make).parameters)
    takes_classes = arguments.pop("num_classes", None) is not None
    options = []
    for argument in arguments.values():
        if argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD):
            continue
        if argument.default is argument.empty:
            raise UsageError(f"--model {name}: give its argument {argument.name} a default")
        if argument.name == "name":
            raise UsageError(f"--model {name}: rename its argument `name`, as --model.name is the name of the model")
        if not isinstance(argument.default, bool | int | float | str | list | tuple | dict | None):
            continue
        default: Any = field(default_factory=partial(deepcopy, argument.default))
        # Other types, such as Callable, are not kept, because jsonargparse would import the object that a recipe names.
        kind = next(filter(is_plain, (argument.annotation, type(argument.default))), Plain)
        options.append((argument.name, Plain if kind is type(None) else kind, default))
    summary = (make.__doc__ or f"the model {name}").strip()
    space = {"__doc__": summary, "make": staticmethod(make), "takes_classes": takes_classes}
    MODELS[name] = make_dataclass("UserModel", options, bases=(UserModel,), namespace=space)
