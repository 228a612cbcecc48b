"""Runs an unchanged training script and records its first optimizer steps. `cifar-zero compare --script` starts it:

`python -m cifar_zero.comparison.trace FOLDER STEPS SCRIPT [ARGUMENT ...]`
"""

import gc
import runpy
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from cifar_zero.comparison.recording import Recording
from cifar_zero.core import exits
from cifar_zero.core.errors import UsageError
from cifar_zero.step_check.recorded import ScriptStep, options_of, samples_in, step_file
from cifar_zero.step_check.replay import MicroBatch, random_state
from cifar_zero.strategies.hooks import tensors_in

FETCHED_AHEAD = 64
"""Maximum number of batches that a script may hold before it trains on them. Accelerate (1.15) fetches one batch ahead,
and transformers (5.3) fetches all batches of a step."""

PRECISIONS = {torch.bfloat16: "bf16-mixed", torch.float16: "16-mixed"}  # Lightning's name of autocast's dtype


class RecordingEnded(BaseException):
    """Raised to end the script after its last recorded step. It does not derive from Exception, because the script
    could catch an Exception."""


class Recorder:
    """Records the optimizer steps of the script that runs in this process. The script must have only one optimizer."""

    def __init__(self, folder: Path, steps: int):
        self.folder, self.steps = folder, steps
        self.recording = Recording()
        self._optimizer: Any = None
        self._model: Any = None
        self._step: ScriptStep | None = None
        self._fetched: deque[tuple[Any, int, Any]] = deque(maxlen=FETCHED_AHEAD)
        """The fetched batches, each with its epoch and the random state before this epoch."""
        self._iterators = 0
        self._seen: list[Tensor] = []  # tensors that modules received since the last backward pass
        self._random_state: Any = None  # random state before the first module call since the last backward pass
        self._buffers: dict[int, Tensor] = {}  # buffers before the step, by id
        self._depth = 0  # number of module calls that are in progress
        self._loss_scale = 1.0

    def install(self) -> None:
        """Installs hooks on optimizer steps. Also wraps the other torch functions whose calls are recorded: calls of
        modules, `Tensor.backward`, iteration over a DataLoader, `GradScaler.scale` and `clip_grad_norm_`."""
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        _around(nn.Module, "__call__", self._call)
        _around(Tensor, "backward", self._backward)
        _around(DataLoader, "__iter__", self._iterate)
        _around(torch.amp.GradScaler, "scale", self._scale)
        for module in (nn.utils, nn.utils.clip_grad):
            _around(module, "clip_grad_norm_", self._clip)

    def _iterate(self, iterate: Any, loader: Any) -> Iterator[Any]:
        state, epoch = random_state(), self._iterators
        self._iterators += 1
        return self._kept(iterate(loader), epoch, state)

    def _kept(self, batches: Iterator[Any], epoch: int, state: Any) -> Iterator[Any]:
        for batch in batches:
            self._fetched.append((_copied(batch), epoch, state))
            yield batch

    def _call(self, call: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self._depth and torch.is_grad_enabled():
            if self._random_state is None:
                self._random_state = random_state()
                device = next((each.device.type for each in module.parameters()), "cpu")
                if torch.is_autocast_enabled(device):
                    self.recording.precision = PRECISIONS[torch.get_autocast_dtype(device)]
            self._seen += [tensor.detach() for tensor in tensors_in([args, kwargs])]
            for buffer in module.buffers() if self._step is None else ():
                self._buffers.setdefault(id(buffer), _copied(buffer))
        self._depth += 1
        try:
            return call(module, *args, **kwargs)
        finally:
            self._depth -= 1

    def _scale(self, scale: Any, scaler: Any, outputs: Any) -> Any:
        self._loss_scale = scaler.get_scale()
        return scale(scaler, outputs)

    def _clip(self, clip: Any, parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        self.recording.gradient_clip_val = float(max_norm)
        return clip(parameters, max_norm, *args, **kwargs)

    def _backward(self, backward: Any, loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        batch, epoch, state = self._trained_on()
        if self._step is None:
            self._step = ScriptStep(epoch, state)
            if self._model is not None:
                self._keep_weights(self._step)
        step, before = self._step, self._random_state or random_state()
        step.micro_batches.append(MicroBatch(batch, len(step.micro_batches), before))
        step.losses.append(float(loss.detach()) / self._loss_scale)
        step.random_state_after = torch.get_rng_state()
        step.draws = step.draws or not torch.equal(before["torch"], step.random_state_after)
        self._random_state, self._loss_scale, self._seen = None, 1.0, []
        self._depth += 1  # activation checkpointing calls modules again in the backward pass
        try:
            return backward(loss, *args, **kwargs)
        finally:
            self._depth -= 1

    def _trained_on(self) -> tuple[Any, int, Any]:
        """Returns the batch of the forward pass, with its epoch and the random state before this epoch. It is the
        oldest fetched batch of which a module has received a tensor. If there is none, it is the last fetched batch."""
        if not self._fetched:
            raise UsageError("--script: its loop must take its batches from a torch DataLoader")
        while len(self._fetched) > 1 and not self._was_seen(self._fetched[0][0]):
            self._fetched.popleft()
        return self._fetched[0]

    def _was_seen(self, batch: Any) -> bool:
        return any(_same(tensor, seen) for tensor in tensors_in(batch) for seen in self._seen)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._optimizer not in (None, optimizer):
            raise UsageError("--script has several optimizers, but DeepSpeed has one: compare each part separately")
        if self._step is None:
            raise UsageError("--script must call loss.backward() before optimizer.step(), without a closure")
        self._optimizer, step = optimizer, self._step
        if self._model is None:
            self._model = model_of(optimizer)
            self.recording.model = type(self._model).__name__
            self.recording.accumulate = len(step.micro_batches)
            self.recording.batch_size = samples_in(step.micro_batches[0].batch)
            self._keep_weights(step)
        if len(step.micro_batches) != self.recording.accumulate:
            counts = f"{self.recording.accumulate} and {len(step.micro_batches)}"
            raise UsageError(f"--script: its steps have {counts} micro-batches: give all steps the same number")
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) in names:
                    name = names[id(parameter)]
                    step.gradients[name] = _copied(parameter.grad)
                    step.options[name] = options_of(group)
                    step.state[name] = _copied(dict(optimizer.state.get(parameter, {})))

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        step = self._step
        assert step is not None
        step.weights_after, step.buffers_after = _tensors(self._model)
        self.recording.steps += 1
        self.recording.draws = self.recording.draws or step.draws
        torch.save(step, step_file(self.folder, self.recording.steps))
        self._step = None
        if self.recording.steps == self.steps:
            raise RecordingEnded

    def _keep_weights(self, step: ScriptStep) -> None:
        step.weights, step.buffers = _tensors(self._model)
        for name, buffer in self._model.named_buffers():
            step.buffers[name] = self._buffers.get(id(buffer), step.buffers[name])
        self._buffers = {}


def main() -> int:
    """Records the first optimizer steps of a script and returns the exit code."""
    folder, steps, script, *arguments = sys.argv[1:]
    recorder = Recorder(Path(folder), int(steps))
    recorder.install()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))  # as Python does when it runs a script
    try:
        runpy.run_path(script, run_name="__main__")
    except RecordingEnded:
        pass
    except SystemExit as end:
        if end.code:
            raise
    if not recorder.recording.steps:
        raise UsageError(f"--script {script} ended without an optimizer step in this process")
    recorder.recording.write(recorder.folder)
    return 0


def model_of(optimizer: Any) -> nn.Module:
    """Returns the module that contains the largest number of an optimizer's parameters. If several modules have equally
    many, it is the one with the most parameters in total. If there are still several, it is the one with the fewest
    submodules, which has no wrappers around it. Raises UsageError if no module has any of the optimizer's
    parameters."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

    def rank(module: nn.Module) -> tuple[int, int, int]:
        parameters = [*module.parameters()]
        trained = sum(id(parameter) in own for parameter in parameters)
        return trained, len(parameters), -sum(1 for _ in module.modules())

    found = max((each for each in gc.get_objects() if issubclass(type(each), nn.Module)), key=rank, default=None)
    if found is None or not rank(found)[0]:
        raise UsageError("--script: no torch.nn.Module has the parameters of its optimizer")
    return found


def _around(owner: Any, name: str, call: Any) -> None:
    """Replaces the function `name` of `owner` with a function that passes the original function and its arguments to
    `call`."""
    original = getattr(owner, name)

    @wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    setattr(owner, name, replaced)


def _tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns copies of a model's weights and buffers on the CPU, keyed by name."""
    return _copied(dict(model.named_parameters())), _copied(dict(model.named_buffers()))


def _copied(tensors: Any) -> Any:
    """Returns a nested structure in which each tensor is a copy on the CPU. Mappings of other libraries become
    dictionaries."""
    if isinstance(tensors, Mapping):
        return {key: _copied(value) for key, value in tensors.items()}
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), tensors)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other.cpu())


if __name__ == "__main__":
    exits.run(main)
