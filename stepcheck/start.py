"""Records what building an engine must not change."""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stepcheck.engines.view import View

PLAIN = (int, float, str)


class Start:
    """A model and its optimizer before an engine is built: plain attributes of modules, ties, and options."""

    def __init__(self, model: nn.Module, optimizer: Any = None):
        self.attributes = {name: _attributes(module) for name, module in model.named_modules()}
        self.ties = _ties(model)
        self.trained = {name: each.requires_grad for name, each in model.named_parameters()}
        self.options = {
            id(parameter): {
                key: value for key, value in group.items() if key != "lr" and isinstance(value, (*PLAIN, tuple))
            }
            for group in getattr(optimizer, "param_groups", ())
            for parameter in group["params"]
        }

    def options_by_index(self, view: View) -> dict[int, dict[str, Any]]:
        """Returns the options of each parameter as the user gave them, without the learning rate, which a schedule may
        change before the first step."""
        return {
            index: self.options[id(parameter)]
            for index, parameter in enumerate(view.parameters)
            if id(parameter) in self.options
        }

    def changes(self, model: nn.Module) -> list[str]:
        """Returns what has changed since, one sentence each."""
        model = model.module if isinstance(model, DistributedDataParallel) else model
        after = {name: _attributes(module) for name, module in model.named_modules()}
        texts = []
        for name, before in self.attributes.items():
            changed = [key for key in before if after.get(name, before).get(key) != before[key]]
            if name and changed:
                texts.append(f"building the engine has changed {name}.{changed[0]}")
        for name, parameter in model.named_parameters():
            if self.trained.get(name, parameter.requires_grad) != parameter.requires_grad:
                texts.append(f"building the engine has {'frozen' if self.trained[name] else 'unfrozen'} {name}")
        ties = _ties(model)
        untied = [name for name, before in self.ties.items() if ties.get(name, before) != before]
        return texts + [f"{name} is no longer tied as before the engine was built" for name in untied[:1]]


def _attributes(module: nn.Module) -> dict[str, Any]:
    own = {key: value for key, value in vars(module).items() if isinstance(value, PLAIN)}
    return {**own, "forward": vars(module).get("forward")}


def _ties(model: nn.Module) -> dict[str, list[str]]:
    ids = [(name, id(parameter)) for name, parameter in model.named_parameters(remove_duplicate=False)]
    return {name: sorted(other for other, each in ids if each == own) for name, own in ids}
