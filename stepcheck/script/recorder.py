"""Runs a training script unchanged and records its first optimizer steps: `python -m stepcheck.script.recorder FOLDER
STEPS SCRIPT [ARGUMENT ...]`. Needs torch only."""

import gc
import math
import runpy
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from stepcheck.attach import find_model
from stepcheck.engines.adapter import same_values, tensors_in
from stepcheck.engines.plain import fused_scale, overflows
from stepcheck.patch import wrap_function
from stepcheck.replay.random_state import random_state
from stepcheck.script.recording import RecordedStep, RecordedTensor, Recording, update_options

FETCHED_AHEAD = 64
"""Most batches that a script may hold before it trains on them. Accelerate (1.15) fetches one batch ahead, and
transformers (5.3) fetches all batches of a step."""

REFUSED = "refused.txt"
"""File in the recording's folder that says why a script cannot be recorded."""

MIXED = {torch.bfloat16: "bf16-mixed", torch.float16: "16-mixed"}
TRUE = {torch.bfloat16: "bf16-true", torch.float16: "16-true", torch.float64: "64-true"}


class RecordingEnded(BaseException):
    """Ends the script after the last recorded step. It is no Exception, because a script may catch every Exception."""


class Refused(RecordingEnded):
    """Ends a script that cannot be recorded."""


class Recorder:
    """Records the optimizer steps of the script that runs in this process."""

    def __init__(self, folder: Path, steps: int):
        self.recording, self.steps = Recording(folder), steps
        self._optimizer: Any = None
        self._model: Any = None
        self._step: RecordedStep | None = None
        self._fetched: deque[tuple[Any, int, Any]] = deque(maxlen=FETCHED_AHEAD)  # batches, each with its epoch, and
        # the random state before this epoch
        self._iterators = 0
        self._fetching = False  # whether a loader makes a batch now, for which its data set may call modules
        self._seen: list[Tensor] = []  # tensors that modules received since the last backward pass
        self._has_precision = False
        self._clips: list[tuple[float, set[int]]] = []  # of this step: the largest norm, and ids of weights
        self._before: Any = None  # random state before the first module call since the last backward pass
        self._buffers: dict[int, Tensor] = {}  # before the step, by id
        self._unscaled: Tensor | None = None  # the loss before GradScaler scaled it

    def install(self) -> None:
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        register_module_forward_pre_hook(self._before_forward)
        wrap_function(Tensor, "backward", self._backward)
        wrap_function(DataLoader, "__iter__", self._iterate)
        wrap_function(torch.amp.GradScaler, "scale", self._scale)
        wrap_function(torch.amp.GradScaler, "step", self._scaler_step)
        for module in (nn.utils, nn.utils.clip_grad):
            wrap_function(module, "clip_grad_norm_", self._clip)
            wrap_function(module, "clip_grad_value_", self._clip_by_value)

    def _iterate(self, iterate: Any, loader: Any) -> Iterator[Any]:
        state, epoch = random_state(), self._iterators
        self._iterators += 1
        return self._keep_batches(iterate(loader), epoch, state)

    def _keep_batches(self, batches: Iterator[Any], epoch: int, state: Any) -> Iterator[Any]:
        try:
            self._fetching = True
            for batch in batches:
                self._fetching = False
                self._fetched.append((_copied(batch), epoch, state))
                yield batch
                self._fetching = True
        finally:
            self._fetching = False

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if not torch.is_grad_enabled() or self._fetching:
            return
        self._before = self._before or random_state()
        weight = next(module.parameters(), None)
        if weight is not None and not self._has_precision:  # a module without weights may run outside of autocast
            self._has_precision = True
            self._note_precision(weight)
        self._seen += [tensor.detach() for tensor in tensors_in(inputs)]
        for buffer in module.buffers() if self._step is None else ():
            self._buffers.setdefault(id(buffer), _copied(buffer))

    def _note_precision(self, weight: Tensor) -> None:
        if torch.is_autocast_enabled(weight.device.type):
            self.recording.precision = MIXED[torch.get_autocast_dtype(weight.device.type)]
        elif weight.dtype in TRUE:
            self.recording.precision = TRUE[weight.dtype]

    def _scale(self, scale: Any, scaler: Any, outputs: Any) -> Any:
        self._unscaled = outputs
        return scale(scaler, outputs)

    def _scaler_step(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        if self._step is not None:  # gradients overflowed
            self._step, self.recording.skipped = None, self.recording.skipped + 1
            self._buffers = {}
        return result

    def _clip(self, clip: Any, parameters: Any, max_norm: float, norm_type: float = 2.0, **kwargs: Any) -> Any:
        if float(norm_type) != 2:
            raise Refused(f"it clips the gradients by their {norm_type}-norm, and Lightning by their 2-norm")
        parameters = [parameters] if isinstance(parameters, Tensor) else [*parameters]
        if not math.isinf(max_norm):  # which only computes the norm
            self._clips.append((float(max_norm), _with_gradient(parameters)))
        return clip(parameters, max_norm, norm_type, **kwargs)

    def _clip_by_value(self, *_: Any, **__: Any) -> Any:
        raise Refused("it clips each element of the gradients, and Lightning would clip their 2-norm")

    def _backward(self, backward: Any, loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        batch, epoch, state = self._trained_on()
        if self._step is None:
            self._step, self._clips = RecordedStep(epoch, state), []
            if self._model is not None:
                self._keep_values(self._step)
        self._step.batches.append(batch)
        self._step.states_after.append(random_state())
        self._step.states.append(self._before or self._step.states_after[-1])
        self._step.losses.append(_copied(loss if self._unscaled is None else self._unscaled))
        try:
            return backward(loss, *args, **kwargs)
        finally:  # activation checkpointing calls modules again in the backward pass
            self._before, self._unscaled, self._seen = None, None, []

    def _trained_on(self) -> tuple[Any, int, Any]:
        """Returns the batch of the current micro-batch, the number of its epoch, and the random state before this
        epoch. Of the fetched batches it is the one of which modules have received the most tensors since the last
        backward pass, and the newest of equals. Drops the batches before it. Raises Refused if there is no batch."""
        if not self._fetched:
            raise Refused("its loop must take its batches from a torch DataLoader")
        counts = [self._count_seen(batch) for batch, *_ in self._fetched]
        for _ in range(max(range(len(counts)), key=lambda number: (counts[number], number))):
            self._fetched.popleft()
        return self._fetched[0]

    def _count_seen(self, batch: Any) -> int:
        return sum(any(_is_same(tensor, seen) for seen in self._seen) for tensor in tensors_in(batch))

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        step, recording = self._step, self.recording
        if self._optimizer not in (None, optimizer):
            raise Refused("it has several optimizers, and the module has one: compare each part separately")
        if step is None or any(map(callable, (*args[1:], kwargs.get("closure")))):
            raise Refused("it must call loss.backward() before optimizer.step(), without a closure")
        if self._model is None:
            self._optimizer, self._model = optimizer, model_of(optimizer)
            recording.model, recording.optimizer = type(self._model).__name__, type(optimizer).__name__
            recording.device = next(self._model.parameters()).device.type
            recording.accumulate, recording.gradient_clip_val = len(step.batches), self._clip_limit(optimizer)
            self._keep_values(step)
        if len(step.batches) != recording.accumulate:
            counts = f"{recording.accumulate} and {len(step.batches)}"
            raise Refused(f"its steps have {counts} micro-batches: give all steps the same number")
        if self._clip_limit(optimizer) != recording.gradient_clip_val:
            raise Refused("it clips the gradients of some steps to another norm, and Lightning those of all to one")
        scale = fused_scale(optimizer)
        options = {id(each): update_options(group) for group in optimizer.param_groups for each in group["params"]}
        for name, parameter in self._model.named_parameters():
            value = step.values[name]
            value.gradient = None if parameter.grad is None else _copied(parameter.grad) / scale
            value.options = options.get(id(parameter), {})
            value.state = _copied(dict(optimizer.state.get(parameter, {})))

    def _clip_limit(self, optimizer: Any) -> float:
        """Returns the norm to which the script has clipped the gradients of this step, or 0. Raises Refused if it has
        clipped twice, or not exactly the optimizer's gradients."""
        if not self._clips:
            return 0.0
        own = _with_gradient(each for group in optimizer.param_groups for each in group["params"])
        max_norm, clipped = self._clips[0]
        if len(self._clips) > 1 or clipped != own:
            raise Refused("it clips parts of the gradients, or clips them twice, and Lightning clips all of them once")
        return max_norm

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if overflows(optimizer):
            return
        step, self._step = self._step, None
        assert step is not None
        for name, tensor in _tensors(self._model).items():
            step.values[name].after = _copied(tensor)
        self.recording.add(step)
        if self.recording.steps == self.steps:
            raise RecordingEnded

    def _keep_values(self, step: RecordedStep) -> None:
        for name, tensor in _tensors(self._model).items():
            before = _copied(tensor) if id(tensor) not in self._buffers else self._buffers[id(tensor)]
            step.values[name] = RecordedTensor(isinstance(tensor, nn.Parameter), before, before)
        self._buffers = {}


def _with_gradient(parameters: Iterable[Tensor]) -> set[int]:
    return {id(each) for each in parameters if each.grad is not None}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def main() -> int:
    """Records the first optimizer steps of a script. Returns the exit code 0, also if the script cannot be recorded:
    the file REFUSED then says why. Does not catch an exception of the script's own."""
    folder, steps, script, *arguments = sys.argv[1:]
    recorder = Recorder(Path(folder), int(steps))
    recorder.install()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))  # as Python does when it runs a script
    try:
        runpy.run_path(script, run_name="__main__")
    except Refused as why:
        Path(folder, REFUSED).write_text(str(why))
    except RecordingEnded:
        pass
    return 0


def model_of(optimizer: Any) -> nn.Module:
    """Returns the module with the most parameters, of all modules of this process that hold all parameters of an
    optimizer. Of equals, returns the one with the fewest submodules, and so no wrapper such as DDP."""
    root = find_model(optimizer)
    own = {id(parameter) for parameter in root.parameters()}
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    holders = [each for each in modules if own <= {id(parameter) for parameter in each.parameters()}]
    return max(holders, key=lambda each: (len([*each.parameters()]), -len([*each.modules()])), default=root)


def _copied(nested: Any) -> Any:
    """Copies tensors to the CPU. Mappings of other libraries become dictionaries."""
    if isinstance(nested, Mapping):
        return {key: _copied(value) for key, value in nested.items()}
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), nested)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and same_values(one, other.cpu())


if __name__ == "__main__":
    sys.exit(main())
