"""Audits a script that knows nothing of it: wraps `deepspeed.initialize`, and finds the models of torch's optimizers.

`stepcheck run` makes each process of the script import this module at its start, before torch.
"""

import atexit
import gc
import importlib
import importlib.abc
import importlib.util
import json
import os
import sys
import weakref
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any


def install(**settings: Any) -> None:
    """Audits each engine and optimizer that this process builds. Takes the fields of `Attached`."""
    attached = Attached(**settings)
    patches = {"torch": attached.patch_torch, "deepspeed": attached.patch_deepspeed}
    sys.meta_path.insert(0, AfterImport(patches))


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function after a module was imported. `find_spec` may be called often before: transformers looks whether
    deepspeed is there before it imports it."""

    def __init__(self, patches: dict[str, Callable[[Any], None]]):
        self.patches = patches

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in self.patches:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next(filter(None, specs), None)
        if spec is None or spec.loader is None:
            return spec
        execute, patch = spec.loader.exec_module, self.patches[name]

        def exec_module(module: Any) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


class Attached:
    """The audits of this process."""

    def __init__(self, reports: str, every: int = 1, weights_every: int = 8, keep_going: bool = False):
        self.reports, self.keep_going = Path(reports), keep_going
        self.options = {"every": every, "weights_every": weights_every}
        self.audits: list[Any] = []
        self.refused: dict[str, str] = {}  # engines that cannot be audited, and why
        self.pending: list[weakref.ref[Any]] = []  # optimizers whose model has not been found yet
        self.owned: set[int] = set()  # ids of optimizers that an engine calls
        self.finder: Any = None  # handle of the hook that waits for the first forward pass

    def patch_torch(self, torch: Any) -> None:
        """Notes each optimizer that is built, and watches clipping and loss scaling."""
        importlib.import_module("stepcheck.updates")  # keeps torch's optimizers as they are now
        importlib.import_module("stepcheck.engines.plain").watch()
        initialize, attached = torch.optim.Optimizer.__init__, self

        @wraps(initialize)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            initialize(self, *args, **kwargs)
            if any(hasattr(each, "placements") for group in self.param_groups for each in group["params"]):
                attached.attach(self)  # FSDP2: `fully_shard` comes before the optimizer
                return
            attached.pending.append(weakref.ref(self))
            if attached.finder is None:
                hook = torch.nn.modules.module.register_module_forward_pre_hook
                attached.finder = hook(attached.before_forward)

        torch.optim.Optimizer.__init__ = __init__
        atexit.register(self.finish)

    def patch_deepspeed(self, deepspeed: Any) -> None:
        """Audits the engines that `deepspeed.initialize` returns."""
        initialize = deepspeed.initialize

        @wraps(initialize)
        def audited(args: Any = None, model: Any = None, optimizer: Any = None, *others: Any, **named: Any) -> Any:
            from stepcheck.start import Start

            start = Start(model, optimizer)
            result = initialize(args, model, optimizer, *others, **named)
            engine = result[0]
            self.owned |= {id(optimizer), id(getattr(engine, "basic_optimizer", None))}
            if engine.optimizer is not None:
                self.audit(engine, start=start)
            return result

        deepspeed.initialize = audited

    def audit(self, *args: Any, **kwargs: Any) -> Any:
        """Starts an audit, unless its engine cannot be audited."""
        from stepcheck.audit import audit
        from stepcheck.engines import NotAuditable

        try:
            started = audit(*args, **self.options, on_fault=self.on_fault, **kwargs)
        except NotAuditable as error:
            self.refused[type(args[0]).__name__] = str(error)
            return None
        self.audits.append(started)
        return started

    def before_forward(self, module: Any, inputs: Any) -> None:
        """Finds the models of the pending optimizers at the first forward pass of a training step, when all wrappers
        have been built."""
        import torch

        if not torch.is_grad_enabled() or not module.training:
            return
        self.finder.remove()
        self.finder = None
        pending, self.pending = [each() for each in self.pending], []
        for optimizer in pending:
            if optimizer is not None and id(optimizer) not in self.owned:
                started = self.attach(optimizer)
                if started is not None and started.view.module is module:
                    started.before_forward(module, inputs, {})

    def attach(self, optimizer: Any) -> Any:
        """Audits an optimizer that no engine owns."""
        root = find_model(optimizer)
        if root is None:
            self.refused[type(optimizer).__name__] = "no module holds all parameters of this optimizer"
            return None
        return self.audit(root, optimizer)

    def on_fault(self, finding: Any) -> None:
        """Ends all processes of the run at once, because ranks that go on would wait for those that have ended."""
        first = all(len(each.verdict.findings) <= 1 for each in self.audits)
        if is_first_rank() and first:
            print(f"stepcheck: {finding}", flush=True)
        if not self.keep_going:
            self.finish()
            sys.stdout.flush()
            os._exit(1)

    def finish(self) -> None:
        """Writes the verdicts, on the first rank."""
        if not is_first_rank():
            return
        verdicts = [{**each.verdict.as_dict(), "summary": str(each.verdict)} for each in self.audits]
        for engine, why in self.refused.items():
            verdicts.append(
                {"engine": engine, "steps": 0, "passed": False, "findings": [], "summary": f"not judged: {why}"}
            )
        if verdicts:
            (self.reports / f"{os.getpid()}.json").write_text(json.dumps(verdicts))


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def find_model(optimizer: Any) -> Any:
    """Returns the smallest module that holds all parameters of an optimizer, or its outermost wrapper (DDP, or what
    torch.compile returns). Returns None if there is none."""
    import torch

    ids = {id(each) for group in optimizer.param_groups for each in group["params"]}
    modules = [each for each in gc.get_objects() if isinstance(each, torch.nn.Module)]
    holders = [each for each in modules if ids <= {id(parameter) for parameter in each.parameters()}]
    if not holders:
        return None
    sizes = {id(each): sum(1 for _ in each.modules()) for each in holders}
    root = min(holders, key=lambda each: sizes[id(each)])
    wrappers = [
        each
        for each in holders
        if type(each).__name__ in ("DistributedDataParallel", "OptimizedModule")
        and any(m is root for m in each.modules())
    ]
    return max(wrappers, key=lambda each: sizes[id(each)], default=root)
