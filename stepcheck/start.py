"""Finds attributes of modules, tied and frozen parameters and optimizer options that building an engine has changed."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stepcheck.engines.adapter import EngineAdapter

PLAIN = (int, float, str)


class Start:
    """Records a model before an engine is built: attributes of modules that are numbers or strings, replaced forward
    methods, tied and frozen parameters, and the options of the optimizer's parameter groups. Without an optimizer,
    these are the groups in `model_parameters`, which DeepSpeed gives to the optimizer that it builds."""

    def __init__(self, model: nn.Module, optimizer: Any = None, model_parameters: Any = None):
        self.attributes = {name: _attributes(module) for name, module in model.named_modules()}
        self.ties = _ties(model)
        self.trained = {name: each.requires_grad for name, each in model.named_parameters()}
        groups = getattr(optimizer, "param_groups", ()) if optimizer is not None else _groups_in(model_parameters)
        self.options = {id(parameter): options_of(group) for group in groups for parameter in group["params"]}

    def changes(self, model: nn.Module) -> list[str]:
        """Returns sentences about what has changed in `model` since the start: the first changed attribute of each
        submodule, each parameter that was frozen or unfrozen, and the first parameter that is tied to others than
        before."""
        model = model.module if isinstance(model, DistributedDataParallel) else model
        after = {name: _attributes(module) for name, module in model.named_modules()}
        texts = []
        for name, before in self.attributes.items():
            changed = [key for key in before if not same(after.get(name, before).get(key), before[key])]
            if name and changed:
                texts.append(f"building the engine has changed {name}.{changed[0]}")
        for name, parameter in model.named_parameters():
            if self.trained.get(name, parameter.requires_grad) != parameter.requires_grad:
                texts.append(f"building the engine has {'frozen' if self.trained[name] else 'unfrozen'} {name}")
        ties = _ties(model)
        untied = [name for name, before in self.ties.items() if ties.get(name, before) != before]
        return texts + [f"{name} is no longer tied as before the engine was built" for name in untied[:1]]


def changed_options(adapter: EngineAdapter, start: Start | None) -> Iterator[str]:
    """Yields a sentence for each optimizer option of a parameter that differs from the value in `start`, or else in the
    engine's configuration. A learning rate is compared only if the configuration has one, and no schedule changes
    it."""
    configured = adapter.given_options()
    for index, group in adapter.parameter_groups().items():
        given = configured.get(index, {})
        own = start.options.get(id(adapter.parameters[index]), {}) if start else {}
        given = {**given, **{key: value for key, value in own.items() if key != "lr" or key in given}}
        given.pop("name", None)  # which DeepSpeed changes in groups with experts
        for key, value in given.items():
            if key in group and not same(plain(group[key]), plain(value)):
                yield f"{key} of {adapter.names[index]} is {group[key]}, and {value} was given"


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if isinstance(value, (*PLAIN, tuple))}


def same(one: Any, other: Any) -> bool:
    return one == other or (one != one and other != other)


def plain(value: Any) -> Any:
    """Converts a list to a tuple and returns any other value unchanged, because JSON has lists in place of tuples."""
    return tuple(value) if isinstance(value, list) else value


def _groups_in(model_parameters: Any) -> list[dict[str, Any]]:
    """Returns the parameter groups in `model_parameters` of `deepspeed.initialize`, without the parameters outside of
    groups. Replaces a tensor or an iterator in the "params" of a group by a list, in place, because an iterator can be
    read only once."""
    found = model_parameters if isinstance(model_parameters, (list, tuple)) else ()
    groups = [each for each in found if isinstance(each, dict)]
    for group in groups:
        if isinstance(group["params"], Tensor):
            group["params"] = [group["params"]]
        elif isinstance(group["params"], Iterator):
            group["params"] = [*group["params"]]
    return groups


def _attributes(module: nn.Module) -> dict[str, Any]:
    own = {key: value for key, value in vars(module).items() if isinstance(value, PLAIN)}
    return {**own, "forward": vars(module).get("forward")}


def _ties(model: nn.Module) -> dict[str, list[str]]:
    ids = [(name, id(parameter)) for name, parameter in model.named_parameters(remove_duplicate=False)]
    return {name: sorted(other for other, each in ids if each == own) for name, own in ids}
