"""Audits a script that does not call stepcheck. Wraps `deepspeed.initialize`, and finds the model of each optimizer.

`stepcheck run` makes each process of the script import this module at its start, before torch.
"""

import atexit
import gc
import importlib
import importlib.abc
import importlib.util
import json
import multiprocessing.util
import os
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from stepcheck.audited_ranks import count_unaudited_ranks, init_process_group
from stepcheck.patch import wrap_function
from stepcheck.verdict import Verdict


def install(**settings: Any) -> None:
    """Makes `AutoAudit`, which takes the `settings`, audit this process. Must be called before torch and deepspeed are
    imported."""
    auto_audit = AutoAudit(**settings)
    patches = {"torch": auto_audit.patch_torch, "deepspeed": auto_audit.patch_deepspeed}
    sys.meta_path.insert(0, AfterImport(patches))


class AfterImport(importlib.abc.MetaPathFinder):
    """Patches modules right after they are imported. `patches` maps the name of a module to a function that takes the
    module. A module that is only looked up is not patched: transformers looks up whether deepspeed is installed, and
    imports it later."""

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


class AutoAudit:
    """Audits every engine and optimizer that this process builds after `patch_torch` and `patch_deepspeed` were called,
    without a call in the script.

    Args:
        reports: Folder to which each process of rank 0 writes its verdicts as a JSON file. Each rank that is audited
            leaves an empty file there, such as "rank 1".
        every, weights_every: See `Audit`.
        keep_going: Whether the training continues after a fault. By default the process ends with exit code 1.
        baseline: Arguments of `Baseline`, or None for an audit without a baseline.
    """

    def __init__(
        self,
        reports: str,
        every: int = 1,
        weights_every: int = 8,
        keep_going: bool = False,
        baseline: dict[str, Any] | None = None,
    ):
        self.reports, self.keep_going = Path(reports), keep_going
        self.options = {"every": every, "weights_every": weights_every}
        self.baseline: Any = baseline  # arguments of Baseline, or the object after the first audit has begun
        self.verdicts: list[Verdict] = []  # of all audits
        self.audits: Any = weakref.WeakSet()  # that hooks of a model or an optimizer keep
        # Pairs, in both orders, of optimizers that update the same parameters.
        self.of_same_parameters: list[tuple[Verdict, Verdict]] = []
        self.refused: list[tuple[Any, Verdict]] = []  # of what cannot be audited, with a weak reference to it
        # Optimizers that are not audited yet, in order, and whether an audit was refused at a forward pass.
        self.pending: Any = weakref.WeakKeyDictionary()
        # Whether an engine is being built, which may call its optimizer once, or a CUDA graph.
        self.building = False
        self.forward_hook: Any = None  # handle of the hook that waits for the first forward pass
        self.has_fault = False  # whether the audits have found a fault
        self.process = 0  # id of the process that trains, because a forked process inherits this object
        self.start_time = 0  # of the first audit in this process, in ns. Reports are sorted by it, not by process ids
        self.is_first_rank = False

    def patch_torch(self, torch: Any) -> None:
        """Registers each optimizer that is built from now on. An optimizer of FSDP2's parameters is audited at once.
        The audit of any other starts at the first forward pass of its model, or else at its first step. Also makes
        `init_process_group` announce this rank (see audited_ranks.py)."""
        importlib.import_module("stepcheck.updates")  # keeps torch's optimizers as they are now
        importlib.import_module("stepcheck.engines.plain").watch()
        importlib.import_module("stepcheck.hooks").watch_autograd()  # before a script imports `grad` by its name
        wrap_function(torch.optim.Optimizer, "__init__", self._build_optimizer)
        wrap_function(torch.cuda, "make_graphed_callables", self._make_cuda_graphs)
        hooks = importlib.import_module("torch.optim.optimizer")
        hooks.register_optimizer_step_pre_hook(lambda optimizer, *_: self.before_step(optimizer))
        if torch.distributed.is_available():
            wrap_function(torch.distributed, "init_process_group", init_process_group)

    def _build_optimizer(self, build: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        build(optimizer, *args, **kwargs)
        if any(hasattr(each, "placements") for group in optimizer.param_groups for each in group["params"]):
            self.audit(None, optimizer)  # FSDP2: `fully_shard` comes before the optimizer
            return
        self.pending[optimizer] = False
        if self.forward_hook is None:
            modules = importlib.import_module("torch.nn.modules.module")
            self.forward_hook = modules.register_module_forward_pre_hook(self.before_forward)

    def _make_cuda_graphs(self, make: Any, callables: Any, *args: Any, **kwargs: Any) -> Any:
        """Ends the audits of modules that become CUDA graphs, because torch accepts only modules without hooks. Starts
        no audit meanwhile."""
        made = callables if isinstance(callables, tuple) else (callables,)
        parts = {id(part) for each in made if hasattr(each, "modules") for part in each.modules()}
        for each in [*self.audits]:
            if any(id(part) in parts for part in each.adapter.module.modules()):
                each.stop("a part of the model becomes a CUDA graph, which must not have hooks")
                each.detach()
        self.building = True
        try:
            return make(callables, *args, **kwargs)
        finally:
            self.building = False

    def patch_deepspeed(self, deepspeed: Any) -> None:
        """Audits each engine that `deepspeed.initialize` returns from now on, if the engine has an optimizer."""
        wrap_function(deepspeed, "initialize", self._initialize)

    def _initialize(
        self,
        initialize: Any,
        args: Any = None,
        model: Any = None,
        optimizer: Any = None,
        model_parameters: Any = None,
        *others: Any,
        **named: Any,
    ) -> Any:
        before, start = {*self.pending}, None
        with suppress(Exception):  # not a module: DeepSpeed itself says what is wrong
            start = importlib.import_module("stepcheck.start").Start(model, optimizer, model_parameters)
        self.building = True
        try:
            result = initialize(args, model, optimizer, model_parameters, *others, **named)
        finally:
            self.building = False
            for each in [*self.pending]:  # the engine calls its optimizers
                if each is optimizer or each not in before:
                    del self.pending[each]
        engine = result[0]
        started = self.audit(engine, start=start) if engine.optimizer is not None else None
        parameters = {id(each) for each in engine.module.parameters()}
        for each in [*self.pending]:  # dropped, as by transformers (5.24, issue 38753)
            if parameters & _ids(each):
                del self.pending[each]
                if started is not None:
                    started.verdict.notes["optimizer"] = f"{type(each).__name__} never steps: DeepSpeed got another"
        return result

    def audit(self, engine: Any, optimizer: Any = None, start: Any = None) -> Any:
        """Starts the audit of an engine, or of the model that an optimizer updates, if `engine` is None. Returns the
        audit. If it cannot start, keeps the reason in `refused` and returns None. Never raises an error, because the
        script would end."""
        owner, started = engine if optimizer is None else optimizer, None
        self.refused = [(other, verdict) for other, verdict in self.refused if other() is not owner]
        for other in [*self.audits]:
            if other.adapter.optimizer is None:  # dropped, and its model may never be called again
                other.detach()
        try:
            from stepcheck.auditor import audit

            engine = find_model(optimizer) if engine is None else engine
            if isinstance(self.baseline, dict):
                from stepcheck.baseline import Baseline

                self.baseline = Baseline(**self.baseline)
            started = audit(engine, optimizer, **self.options, on_fault=self.on_fault, start=start)
            if missing := count_unaudited_ranks():
                why = f"{missing} of {started.adapter.ranks} run without stepcheck: start it on each node"
                raise importlib.import_module("stepcheck.engines").NotAuditable(why)
            with suppress(OSError):  # a full disk, on this rank only
                (self.reports / f"rank {_rank()}").touch()
            if self.baseline:
                started.baseline = self.baseline.audit(self._name_engine())
        except Exception as error:
            if started is not None:
                started.detach()
            known = type(error).__name__ == "NotAuditable"
            why = str(error) if known else f"the audit failed: {type(error).__name__}: {error}"
            self._report_at_exit()
            refused = optimizer if engine is None else engine
            verdict = Verdict(type(refused).__name__, not_judged={"all steps": why})
            self.refused.append((weakref.ref(owner), verdict))
            return None
        self._report_at_exit()
        if optimizer is not None:
            self.pending.pop(optimizer, None)
        self.verdicts.append(started.verdict)
        for other in self.audits:
            if other.adapter.targets.keys() & started.adapter.targets.keys():
                one, two = other.verdict, started.verdict
                self.of_same_parameters += [(one, two), (two, one)]
        self.audits.add(started)
        return started

    def _name_engine(self) -> str:
        """Returns a name such as "engine 1", which no other engine in the run's baseline has. Engines are numbered in
        the order in which the processes of rank 0 start their audits. Returns "" on other ranks, which save no
        engines."""
        if _rank():
            return ""
        number = 1
        while True:
            try:
                (self.reports / f"engine {number}").touch(exist_ok=False)
            except FileExistsError:
                number += 1
                continue
            except OSError:  # a full disk: the other ranks audit, so this one must
                number = max(number, len(self.verdicts) + 1)
            return f"engine {number}"

    def before_forward(self, module: Any, inputs: Any) -> None:
        """Starts the audit of each pending optimizer that updates a parameter of `module`. torch calls this method
        before the forward pass of every module, when most scripts have built all wrappers. If an audit is refused,
        `before_step` tries again."""
        import torch

        if not self._may_start() or not torch.is_grad_enabled():
            return
        parameters = {id(each) for each in module.parameters()}
        for optimizer, refused in [*self.pending.items()]:
            if not refused and parameters & _ids(optimizer):
                started = self.audit(None, optimizer)
                if started is None:
                    self.pending[optimizer] = True
                elif started.adapter.module is module:
                    started.before_forward(module, inputs, {})
        if not self.pending and self.forward_hook is not None:
            self.forward_hook.remove()
            self.forward_hook = None

    def _may_start(self) -> bool:
        import torch

        if torch.compiler.is_compiling() or self.building:
            return False
        from stepcheck.engines.adapter import records_cuda_graph

        return not records_cuda_graph()

    def before_step(self, optimizer: Any) -> None:
        """Starts the audit of an optimizer at its first step, if the forward pass was not seen, or came before the
        model was wrapped."""
        if self._may_start() and optimizer in self.pending:
            del self.pending[optimizer]
            self.audit(None, optimizer)

    def on_fault(self, finding: Any) -> None:
        """Prints the first fault, on the first rank. Unless `keep_going` is set, writes the verdicts and ends this
        process with exit code 1. The audit calls this method on every rank, because a remaining rank would wait for the
        others."""
        if self.is_first_rank and not self.has_fault:
            print(f"stepcheck: {finding}", flush=True)
        self.has_fault = True
        if not self.keep_going:
            self.finish()
            sys.stdout.flush()
            time.sleep(1)  # the first rank that ends breaks the connections of the others, which write reports
            os._exit(1)

    def finish(self) -> None:
        """Writes the verdicts to a file in the folder of reports, and the steps of a new baseline unless there was a
        fault. Leaves out optimizers that never step because others update their parameters. Does nothing on ranks other
        than 0, or in a forked process that has started no audit itself."""
        if not self.is_first_rank or os.getpid() != self.process:
            return
        replaced = {id(one) for one, other in self.of_same_parameters if other.steps and _never_stepped(one)}
        kept = [each for each in self.verdicts if id(each) not in replaced]
        verdicts = [each.as_dict() for each in (*kept, *(refused for _, refused in self.refused))]
        try:
            if verdicts:
                (self.reports / f"{self.start_time}-{os.getpid()}.json").write_text(json.dumps(verdicts))
            if self.verdicts and self.baseline and not self.has_fault:
                self.baseline.write()
        except (OSError, RuntimeError) as error:  # torch.save raises the latter
            print(f"stepcheck: {self.reports} cannot be written: {error}", file=sys.stderr, flush=True)

    def _report_at_exit(self) -> None:
        """Makes this process write its verdicts when it ends, without those that a forked process has inherited.
        multiprocessing ends a forked process without atexit, so a Finalize is registered too."""
        if self.process != os.getpid():
            self.process, self.start_time, self.verdicts, self.refused = os.getpid(), time.time_ns(), [], []
            self.is_first_rank = _rank() == 0
            atexit.register(self.finish)
            multiprocessing.util.Finalize(None, self.finish, exitpriority=0)


def _never_stepped(verdict: Verdict) -> bool:
    reasons = verdict.not_judged.keys() - {"updates"}  # of an unknown class, also before the first step
    return not (verdict.steps or verdict.skipped or verdict.findings or reasons)


def _rank() -> int:
    import torch.distributed as dist

    initialized = dist.is_available() and dist.is_initialized()
    return dist.get_rank() if initialized else int(os.environ.get("RANK", "0"))


def _ids(optimizer: Any) -> set[int]:
    return {id(each) for group in optimizer.param_groups for each in group["params"]}


def find_model(optimizer: Any) -> Any:
    """Returns the module with the fewest submodules, of all modules of this process that hold all parameters of an
    optimizer. If it is wrapped (DDP, FSDP1 or torch.compile), returns its outermost wrapper instead. If no module holds
    all parameters, returns a new module that contains several modules and tensors, which together hold them."""
    import torch

    # The type is asked, and not the object, because proxies of other libraries pretend to be what they stand for.
    modules = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
    parameters_of = {id(each): {id(parameter) for parameter in each.parameters()} for each in modules}
    missing = {id(each): each for group in optimizer.param_groups for each in group["params"]}
    roots = []
    while missing:
        most = max((len(missing.keys() & ids) for ids in parameters_of.values()), default=0)
        if not most:
            break
        holders = [each for each in modules if len(missing.keys() & parameters_of[id(each)]) == most]
        roots.append(_outermost(min(holders, key=_size), holders))
        missing = {key: each for key, each in missing.items() if key not in parameters_of[id(roots[-1])]}
    if len(roots) == 1 and not missing:
        return roots[0]
    parts = torch.nn.Module()
    for number, root in enumerate(roots):
        parts.add_module(str(number), root)
    parts._parameters.update({f"tensor {number}": each for number, each in enumerate(missing.values())})
    return parts


def _outermost(root: Any, modules: list[Any]) -> Any:
    names = ("DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule")
    wrappers = [each for each in modules if type(each).__name__ in names and any(m is root for m in each.modules())]
    return max(wrappers, key=_size, default=root)


def _size(module: Any) -> int:
    return sum(1 for _ in module.modules())
