"""Registers the hooks of an audit on a module and its parameters."""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from stepcheck.engines.adapter import Hook, hookable_parts
from stepcheck.patch import wrap_function

CALLS: list[object] = []
"""Has an item for each call of `torch.autograd.grad` that runs. Such a call adds its gradients to no parameter."""

WAITING: list[int] = []
"""Autograd's ids of backward passes that wait for an inner one, such as a reentrant checkpoint's. The outermost is
first."""


class Hooks:
    """Makes modules and parameters call an audit: before each forward pass, before a state dict is loaded, and with
    each gradient that autograd computes. `audit.undo` removes the hooks."""

    def __init__(self, audit: Any):
        watch_autograd()
        self.audit, self.adapter = audit, audit.adapter
        self._of_parameters: dict[int, Any] = {}  # handles, by id of the parameter
        before = Hook(audit.before_forward)
        modules = [part for _, part in hookable_parts(self.adapter.module)]
        handles = [
            each.register_forward_pre_hook(before, with_kwargs=True) for each in _called_modules(self.adapter.module)
        ]
        trained = {id(self.adapter.parameters[index]) for index in self.adapter.trained}
        for module in modules:
            loading = partial(self._before_loading, any(id(each) in trained for each in module.parameters()))
            handles.append(module.register_load_state_dict_pre_hook(Hook(loading)))
        for module in modules if self.adapter.gathers else ():
            named, index_of = module._parameters.items(), self.adapter.index_of
            own = {name: index_of[id(each)] for name, each in named if id(each) in index_of}
            if own:
                handles.append(module.register_forward_pre_hook(Hook(partial(audit.before_module, own))))
        for handle in handles:
            audit.undo.callback(handle.remove)
        self.watch_gradients()

    def _before_loading(self, trained: bool, *_: Any) -> None:
        self.audit.reset_history(trained)

    def watch_gradients(self) -> None:
        """Registers hooks on the trained parameters, including those that were unfrozen during the training. Moves
        these hooks, and the hook before the optimizer's step, behind the script's own hooks, which may change a
        gradient."""
        self.adapter.move_hook_last()
        for index in self.adapter.trained:
            if self.adapter.parameters[index].requires_grad:
                self.watch_gradient(index, self.adapter.parameters[index])

    def watch_gradient(self, index: int, parameter: Any) -> None:
        handle = self._of_parameters.get(id(parameter))
        if handle is None:
            see = partial(self.audit.add_gradient, index, parameter)
            handle = parameter.register_hook(lambda gradient: None if CALLS else see(gradient))
            self._of_parameters[id(parameter)] = handle
            self.audit.undo.callback(handle.remove)
        elif next(reversed(parameter._backward_hooks)) != handle.id:
            parameter._backward_hooks[handle.id] = parameter._backward_hooks.pop(handle.id)


def _called_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yields `module` if its class defines a forward pass. Otherwise (a ModuleList, for example) yields the outermost
    of its submodules that define one. Leaves out modules in TorchScript, which cannot have hooks."""
    if type(module).forward is nn.Module.forward:
        for child in module.children():
            yield from _called_modules(child)
    elif not isinstance(module, torch.jit.ScriptModule):
        yield module


def outermost_backward() -> int:
    """Returns autograd's id of the outermost backward pass that runs, or -1."""
    return WAITING[0] if WAITING else torch._C._current_graph_task_id()


@cache
def watch_autograd() -> None:
    """Makes `torch.autograd.grad` and `torch.autograd.backward` update CALLS and WAITING. A second call does
    nothing."""
    wrap_function(torch.autograd, "grad", _grad)
    wrap_function(torch.autograd, "backward", _backward)


def _grad(grad: Any, *args: Any, **kwargs: Any) -> Any:
    CALLS.append(None)
    try:
        return grad(*args, **kwargs)
    finally:
        CALLS.pop()


def _backward(backward: Any, *args: Any, **kwargs: Any) -> None:
    outer = torch._C._current_graph_task_id()
    if outer < 0:
        return backward(*args, **kwargs)
    WAITING.append(outer)
    try:
        backward(*args, **kwargs)
    finally:
        WAITING.pop()
