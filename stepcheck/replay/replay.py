"""Defines `Replay`, which judges chosen steps for an audit."""

import importlib
import math
import platform
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn

from stepcheck.engines.adapter import hookable_parts, plain_name, tensors_in
from stepcheck.engines.plain import fused_scale
from stepcheck.replay import compare
from stepcheck.replay.memory import available, begin_replay, end_replay
from stepcheck.replay.plain_copy import Computed, MicroBatch, PlainCopy, buffers_of, cloned, function_of
from stepcheck.replay.random_state import random_state, random_state_kept, same_random_state
from stepcheck.verdict import ENOUGH

BYTES = 36
"""Most bytes that a replay needs for each parameter, beside the training and without activations: weights, the
gradients of the training and of the first replay (4 each), and weights, their gradient and its sum in float64."""

STEADY = 10.0
"""The least ratio of a fault's error to the difference between two replays of the step. With a smaller ratio, the step
is not judged."""


class Replay:
    """Computes chosen steps again on a plain copy, on each rank separately. Pass it to `audit`, which must audit these
    steps too.

    Call `micro_batch` before each forward pass, and `loss` after it.
    """

    def __init__(
        self,
        copy: nn.Module,
        every: int = 1,
        steps: Collection[int] = (),
        only: str = "",
        outputs: bool = False,
        internal: Collection[str] = (),
    ):
        """Chooses the steps.

        Args:
            copy: A deep copy of the module that will be trained, made before an engine or wrapper is built of it.
            every: Replay each step whose number is divisible by this; 0 for none.
            steps: Numbers of more steps to replay, from 1.
            only: Regular expression that is searched in the names of weights. Only the gradients of matching weights
                are kept and compared.
            outputs: Whether to compare the outputs of all submodules, so that a fault names the first that differs.
            internal: Names of attributes of the module that a replay must not restore.
        """
        self.every, self.steps, self.only, self.outputs = every, {*steps}, re.compile(only), outputs
        self.copy = PlainCopy(copy, internal)
        self.audit: Any = None  # the Audit, from its start
        self.actual: Computed | None = None  # of the step that is being replayed
        self.then: Callable[[Any], None] | None = None  # called with the copy, which has the gradients of a step
        self.hooked: set[str] = set()  # weights whose gradients a hook of the script may change
        self._caller: str | None = None  # the attribute of the copy that calls the trained module
        self._begun = 0  # the last step whose first micro-batch was seen
        self._chosen = False  # whether this step is replayed, on all ranks
        self._error = ""  # why this rank cannot replay this step
        self._micro_batches: list[MicroBatch] = []
        self._drawn: dict[str, Any] | None = None  # the random state after the first replay
        self._handles: list[Any] = []

    def chooses(self, step: int) -> bool:
        return step in self.steps or bool(self.every and step % self.every == 0)

    def attach(self, audit: Any) -> None:
        """Connects the replay to an audit. The engine must have been built."""
        self.audit = audit
        audit.adapter.prepare_copy(self.copy.module)
        self._caller = function_of(audit.adapter.module, self.copy.module)
        audit.undo.callback(self._end)

    # What the training calls
    def micro_batch(self, compute: Callable[..., Tensor], *arguments: Any) -> None:
        """Saves a micro-batch, before its forward pass. Every rank must call it.

        Args:
            compute: Takes a module like the trained one, and returns the loss of the micro-batch, as the training
                passes it to `backward`, but without a loss scale. It must not change a batch that it has itself.
            arguments: More arguments of `compute`, such as the batch, which are copied.
        """
        audit, changed = self.audit, None
        if audit.step != self._begun:
            self._end()
            self._begun = audit.step
            self._chosen = self.chooses(audit.step) and not audit.stopped
            if self._chosen:
                audit.begin()
                self._try(self._begin)
                self._gives_up()
        elif self.actual is not None:
            changed = self._try(self._changed)
        if self.actual is not None:
            self._try(lambda: self._remember(compute, arguments, changed))

    def loss(self, loss: Tensor) -> None:
        """Records the loss of the last micro-batch, as `compute` returns it. Without this call, losses are not
        compared."""
        if self.actual is not None:
            self.actual.losses.append(loss.detach().clone())

    # What the audit calls
    def add_gradient(self, index: int, gradient: Tensor) -> None:
        name = self.audit.adapter.names[index]
        if self.actual is not None and self.only.search(name):
            self.actual.add(name, gradient)

    def judge(self) -> None:
        """Compares the replayed step with the training. Every rank must call it. If one rank fails to replay the step,
        no rank judges it."""
        if self._chosen:
            self._judge()
            self._end()

    def _judge(self) -> None:
        audit = self.audit
        self.hooked = {
            name for name, each in zip(audit.adapter.names, audit.adapter.parameters, strict=True) if _is_hooked(each)
        }
        self._try(lambda: self.copy.check_large(audit.adapter.module))
        if self._gives_up():
            return
        low, exact = self._compute(then=self.then), None
        same = low is not None and bool(self._try(lambda: self._is_identical(low)))
        is_same_on_all = all(audit.adapter.ranks.all_gather(same))
        if self._gives_up():
            return
        if not is_same_on_all:
            exact = self._compute(exact=True)
            if self._gives_up():
                return
        if low is not None:
            self._report(low, exact)

    def _gives_up(self) -> bool:
        """Ends the replay of this step on all ranks if one of them has an error. Every rank must call it."""
        error = self.audit.adapter.ranks.first(self._error or self.audit.error)
        if error:
            self.audit.verdict.not_judged[f"the replay of step {self.audit.step}"] = error
            self._end()
        return bool(error)

    def _remember(
        self, compute: Callable[..., Tensor], arguments: tuple[Any, ...], changed: dict[str, Tensor] | None
    ) -> None:
        module = self.audit.adapter.module
        self.copy.check_large(module)
        state = self.copy.state_of(module)
        micro_batch = MicroBatch(compute, cloned(arguments), random_state(), state, changed)
        self._micro_batches.append(micro_batch)
        if self.audit.adapter.syncs_buffers and self.audit.adapter.ranks.rank:
            self._watch_synced(micro_batch.synced)

    def _changed(self) -> dict[str, Tensor]:
        """Returns the weights and buffers that have changed within this step. Every rank must call it. Gathers only
        weights of which a rank's own part has changed, because ZeRO 3 of DeepSpeed 0.18.1 and earlier releases gathers
        some weights only between steps."""
        adapter = self.audit.adapter
        own = {index for index, name in enumerate(adapter.names) if self.copy.differs(name, *adapter.own_part(index))}
        of_any_rank = sorted({*chain(*adapter.ranks.all_gather(own))})
        weights = ((adapter.names[index], adapter.full_weight(index)) for index in of_any_rank)
        return self.copy.changed(chain(weights, buffers_of(adapter.module).items()))

    def _watch_synced(self, synced: dict[str, Tensor]) -> None:
        """Keeps the buffers that DDP copies from rank 0 before the next forward pass."""
        adapter = self.audit.adapter

        def keep(*_: Any) -> None:
            if not synced:
                synced.update(buffers_of(adapter.module))

        self._handles += [wrapper.module.register_forward_pre_hook(keep) for wrapper in adapter.wrappers]

    def _try(self, function: Callable[[], Any]) -> Any:
        """Returns the result of a function. If it raises, returns None, and stores the error as one line in `_error`
        unless this step has one already."""
        try:
            return function()
        except Exception as error:  # what the module's code raises, in float64 for example
            self._error = self._error or f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return None

    def _begin(self) -> None:
        audit, adapter = self.audit, self.audit.adapter
        if problem := adapter.ranks.first(self._problem()):
            audit.verdict.not_judged["replays"] = problem
            self._chosen, self.every, self.steps = False, 0, set()
            return
        begin_replay(adapter.device)
        needed = BYTES * sum(math.prod(adapter.shape(index)) for index in range(len(adapter.names)))
        node = platform.node()
        free = available(adapter.device, adapter.ranks.all_gather(node).count(node))
        if any(adapter.ranks.all_gather(free is not None and needed > free)):
            raise MemoryError(
                f"it needs up to {needed / 1e9:.1f} GB on a rank, and {(free or 0) / 1e9:.1f} GB are free"
            )
        weights = {name: adapter.full_weight(index) for index, name in enumerate(adapter.names)}
        required = {index for index, each in enumerate(adapter.parameters) if each.requires_grad}
        trained = {adapter.names[index] for index in adapter.trained & required}
        compared = {name for name in trained if self.only.search(name)}
        if trained and not compared:
            raise ValueError(f"no trained weight has a name with {self.only.pattern!r}, such as {min(trained)}")
        self.copy.keep(weights, buffers_of(adapter.module), {adapter.names[index] for index in required}, compared)
        self.actual = Computed()
        self._handles = self._watch(adapter.module, self.actual)

    def _problem(self) -> str:
        """Returns why the copy cannot compute what the trained module computes, or ""."""
        trained, copied = self.audit.adapter.module, self.copy.module
        for kind in ("named_modules", "named_parameters"):
            before, now = ({plain_name(each, name) for name, _ in getattr(each, kind)()} for each in (copied, trained))
            for name in sorted(before ^ now):
                how = "has lost" if name in before else "now has"
                return f"the module {how} {name}, unlike the copy that was made of it"
        return f"{self._caller} has a function that calls the trained module, also in a copy" if self._caller else ""

    def _end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.actual, self._micro_batches, self._handles, self._error, self._drawn = None, [], [], "", None
        self.copy.drop_saved()
        if self._chosen:
            end_replay(self.audit.adapter.device)
        self._chosen = False

    def _compute(self, exact: bool = False, then: Callable[[Any], None] | None = None) -> Computed | None:
        """Returns a replay of the step, or None if it fails on this rank. Restores the random states afterwards."""
        if self.actual is None or self._error:
            return None
        adapter = self.audit.adapter
        scale = self.audit.scale * fused_scale(adapter.optimizer)
        arguments = self._micro_batches, adapter.divisor, scale, self._watch, exact, then
        with random_state_kept(), refusing_calls(adapter.module):
            computed = self._try(lambda: self.copy.compute(*arguments))
            drawn = random_state()
        self._drawn = self._drawn or drawn
        if not same_random_state(drawn, self._micro_batches[-1].random_state) and _compiles_random_numbers(
            adapter.module
        ):
            self._error = self._error or (
                "torch.compile draws other random numbers; set torch._inductor.config.fallback_random"
            )
        elif not same_random_state(drawn, self._drawn):
            self._error = self._error or "the module draws other random numbers in a later replay, as in float64"
        return computed

    def _is_identical(self, low: Computed) -> bool:
        assert self.actual is not None
        self.actual.buffers = buffers_of(self.audit.adapter.module)
        self._note_buffers(self.actual, low)
        self._leave_out_unknown(self.actual, low)
        return compare.identical(self.actual, low) and not self._may_lack_gradients(low)

    def _may_lack_gradients(self, low: Computed) -> bool:
        """Returns whether autocast may have lost gradients in the training and in the replay alike. Older releases of
        torch use a weight that was cast under `no_grad` again later (torch issue 142234)."""
        return self.copy.autocasts and bool(self.copy.compared - low.gradients.keys() - self.hooked)

    def _note_buffers(self, actual: Computed, low: Computed) -> None:
        """Notes buffers that only the training has changed, which are not compared, because its hooks may do so."""
        others = {name: each for name, each in actual.buffers.items() if name not in low.buffers}
        for name in self.copy.changed(others.items()):
            text = f"something other than the forward pass changes {name}, so the replay does not compare it"
            self.audit.verdict.notes["buffers"] = text

    def _leave_out_unknown(self, actual: Computed, low: Computed) -> None:
        """Removes, in both, the values that cannot be compared: losses, if their numbers differ; gradients that hooks
        of the script may change; and outputs, if the modules were called in another order. After that, no step compares
        outputs."""
        if len(actual.losses) != len(low.losses):
            actual.losses, low.losses = [], []
        for name in self.hooked:  # the copy lacks the hooks
            actual.gradients.pop(name, None)
            low.gradients.pop(name, None)
            self.audit.verdict.not_judged["some replayed gradients"] = "hooks on parameters may change them"
        if [(name, each.shape) for name, each in actual.outputs] != [(name, each.shape) for name, each in low.outputs]:
            self.audit.verdict.not_judged["outputs of modules"] = "the copy calls modules in another order"
            self.outputs, actual.outputs, low.outputs = False, [], []

    def _report(self, low: Computed, exact: Computed | None) -> None:
        """Adds the results of a replayed step to the audit. `exact` is None if the step was bit-identical on all ranks.
        Every rank must call it."""
        audit, actual = self.audit, self.actual
        assert actual is not None
        if exact is None:
            audit.verdict.replayed += 1
            audit.verdict.identical += 1
            return
        exact.gradients = {name: each for name, each in exact.gradients.items() if name not in self.hooked}
        exact.losses = exact.losses if low.losses else []
        exact.outputs = exact.outputs if low.outputs else []
        own_errors = self._try(lambda: compare.loss_errors(low, exact)) or []
        errors = [each for own in audit.adapter.ranks.all_gather(own_errors) for each in own]
        rounding = compare.mean_square(errors)
        arguments = actual, low, exact, self.copy.lowest, rounding
        compared: list[compare.Compared] = self._try(lambda: [*compare.compare(*arguments)]) or []
        faults = {(each.kind, each.name): each.error for each in compared if each.share > 1}
        if any(audit.adapter.ranks.all_gather(bool(faults))):  # a module with experts computes on all ranks or on none
            unsteady = self._try(lambda: self._unsteady_buffers(low, exact, faults)) or ()
            compared = [each for each in compared if each.kind != "replayed buffer" or each.name not in unsteady]
        if self._gives_up():
            return
        for each in compare.worst(compared):
            audit.add(each.kind, each.share, str(each))
        gradients = [each for each in compared if each.kind == "replayed gradient"]
        judged = sum(each.elements for each in gradients if each.tolerance < compare.VISIBLE)
        if judged < ENOUGH * sum(each.elements for each in gradients):
            self._error = f"the tolerance of many gradients is {compare.VISIBLE} of their norm or more"
        audit.verdict.replayed += not self._gives_up()

    def _unsteady_buffers(self, low: Computed, exact: Computed, faults: dict[tuple[str, str], float]) -> list[str]:
        """Replays a step once more. Returns the buffers with a fault that differ between the two replays, because their
        errors say nothing about the training. Raises RuntimeError if a loss, gradient or output does, because other
        gradients may depend on it."""
        again, found = self._compute(), []
        if again is None:
            return found
        self._leave_out_unknown(low, again)
        for each in compare.compare(again, low, exact, self.copy.lowest, rounding=0.0):
            if each.error <= faults.get((each.kind, each.name), math.inf) / STEADY:
                continue
            text = (
                f"two replays of it differ on {self.audit.adapter.device} (the {each.kind} of {each.name} by "
                f"{each.error:.2g} of its norm): the module has state or random numbers that a replay cannot "
                "restore, or the device computes wrongly"
            )
            if each.kind != "replayed buffer":
                raise RuntimeError(text)
            self.audit.verdict.not_judged["some replayed buffers"] = text
            found.append(each.name)
        return found

    def _watch(self, module: nn.Module, computed: Computed) -> list[Any]:
        if not self.outputs:
            return []
        return [
            part.register_forward_hook(partial(_keep_output, computed, plain_name(module, name)))
            for name, part in hookable_parts(module)
            if plain_name(module, name)  # only the training may call the outermost module
        ]


@contextmanager
def refusing_calls(module: nn.Module) -> Iterator[None]:
    """Context manager in which an error is raised if a copy of the trained `module` calls it, or computes a gradient of
    its weights, before this changes anything of the training."""
    with ExitStack() as stack:
        for _, part in hookable_parts(module):
            stack.callback(part.register_forward_pre_hook(_refuse, prepend=True).remove)
        for parameter in module.parameters():
            if parameter.requires_grad:
                stack.callback(parameter.register_hook(_refuse).remove)
                hooks: Any = parameter._backward_hooks  # torch calls them in the order of insertion
                for number in [*hooks][:-1]:
                    hooks[number] = hooks.pop(number)
        yield


def _refuse(*_: Any) -> None:
    raise RuntimeError("the copy of the module calls the trained module")


def _is_hooked(parameter: Any) -> bool:
    hooks = (getattr(parameter, "_backward_hooks", None) or {}).values()
    functions = [hook.func if isinstance(hook, partial) else hook for hook in hooks]
    packages = {(getattr(each, "__module__", None) or "").partition(".")[0] for each in functions}
    return bool(packages - {"torch", "deepspeed", "stepcheck"})


def _compiles_random_numbers(module: nn.Module) -> bool:
    """Returns whether parts of a module are compiled by Inductor, which draws its own random numbers (torch 2.15)."""
    compiled = any(
        each._compiled_call_impl
        or type(each).__name__ == "OptimizedModule"
        or getattr(each, "_compiler_ctx", None)  # of Lightning
        for each in module.modules()
    )
    return compiled and not importlib.import_module("torch._inductor.config").fallback_random


def _keep_output(computed: Computed, name: str, part: Any, inputs: Any, output: Any) -> None:
    for each in tensors_in(output):
        if each.is_floating_point():
            computed.outputs.append((name, each.detach().clone()))
