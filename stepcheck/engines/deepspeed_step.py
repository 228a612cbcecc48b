"""Watches the calls of a DeepSpeedEngine in a step."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from stepcheck.engines.adapter import Hook, tensors_in
from stepcheck.patch import wrap_function

LOSS = 1e-5
"""Largest relative error of the factor by which a loss is multiplied: a few roundings of float32."""

METHODS = ("forward", "backward", "step", "load_checkpoint")


class EngineStep:
    """Wraps the engine's METHODS, to end the audit's steps and to measure the factor by which the engine multiplies the
    loss. DeepSpeed multiplies the loss itself (up to 0.18.2, and since 0.19.6), or the gradients of the module's
    outputs in hooks (0.18.3 to 0.19.5, and since 0.18.3 wherever a script calls `loss.backward()`). Only the product of
    both factors is judged. Also judges how far each call of `step` moves the learning-rate schedule."""

    def __init__(self, adapter: Any, audit: Any):
        self.adapter, self.engine, self.audit = adapter, adapter.engine, audit
        self.incoming: list[Tensor] = []  # gradient norms of the outputs, before the engine's hooks
        self.outgoing: list[Tensor] = []  # and after them
        self.outputs: list[Tensor] = []
        self.computes = False  # whether the engine's forward pass runs, which may call the module
        audit.undo.callback(self.engine.module.register_forward_hook(Hook(self._after_module)).remove)
        for name in METHODS:
            audit.undo.callback(wrap_function(self.engine, name, getattr(self, name)))

    def forward(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        self._judge_plain_backward()
        self.computes = True
        try:
            output = real(*args, **kwargs)
        finally:
            self.computes = False
        self._watch(output, self.outgoing)
        return output

    def _after_module(self, module: Any, inputs: Any, output: Any) -> None:
        if self.computes:  # the script may call the module too
            self._watch(output, self.incoming)

    def _watch(self, output: Any, seen: list[Tensor]) -> None:
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:  # not of a parameter, which keeps its hooks
                tensor.register_hook(lambda gradient: seen.append(_norm(gradient)))
                self.outputs.append(tensor)

    def backward(self, real: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        is_output = any(loss is each for each in self.outputs)
        self.outputs = []
        divides = self.adapter.divides_loss and kwargs.get("scale_wrt_gas", True)
        self.adapter.divisor = float(self.engine.gradient_accumulation_steps() if divides else 1)
        expected = self.adapter.loss_scale() / self.adapter.divisor
        seen: list[Tensor] = []
        handle = loss.register_hook(lambda gradient: seen.append(gradient.detach().double()))
        try:
            result = real(loss, *args, **kwargs)
            self._judge_backward(loss, seen, is_output, expected)
        finally:  # the script may catch an error and continue
            handle.remove()
            self._clear_losses()
        return result

    def _judge_backward(self, loss: Tensor, seen: list[Tensor], is_output: bool, expected: float) -> None:
        """Compares the factor by which the engine has multiplied a loss, or the gradients of its outputs, with
        `expected`. `seen` has the gradient that arrived at `loss`, or nothing if none did. `is_output` tells whether
        `loss` is an output of the engine, whose gradient the engine may multiply in a hook of its own."""
        one = torch.ones((), dtype=torch.float64, device=loss.device)
        ratios = self._ratios()
        factor = seen[0].norm() if seen else 0 * one
        if is_output and ratios:
            # The hook on the loss runs after the engine's hook on the same tensor, unless the loss was multiplied in
            # place since, as transformers does: then it belongs to the new value and runs first.
            ratios[0] = torch.where(factor == self.outgoing[0], one, ratios[0])
            ratios = [torch.stack(ratios).nan_to_num(nan=1.0).prod()]
        # A loss that was multiplied by 0 leaves no ratio.
        factors = [torch.where(factor == 0, factor, factor * ratio) for ratio in ratios or [one]]
        self._judge_scale(factors, expected, loss)

    def _judge_plain_backward(self) -> None:
        """Judges a backward pass that the script has started by `loss.backward()`, if there was one. The engine divides
        by the micro-batches in its hooks on the outputs, and the script scales the loss for float16."""
        parts = float(self.engine.gradient_accumulation_steps())
        if self.outputs:
            self.adapter.divisor = parts
        self._judge_scale(self._ratios(), 1 / parts, *self.outputs)
        self._clear_losses()

    def _ratios(self) -> list[Tensor]:
        """Returns the factor by which the engine's hooks have multiplied the gradient of each output in the last
        backward pass. It is not finite where the gradient was 0 or overflowed."""
        return [after / before for before, after in zip(self.incoming, self.outgoing, strict=False)]

    def _judge_scale(self, factors: list[Tensor], expected: float, *losses: Tensor) -> None:
        """Compares factors with the expected one. One that is not finite says nothing: the loss had no effect, or a
        loss scale overflowed, and then the engine leaves the step out."""
        tolerance = max([LOSS, *(8 * torch.finfo(each.dtype).eps for each in losses)])
        for factor in factors:
            text = partial(wrong_scale, self.audit.micro_batches, factor, expected)
            self.audit.add("loss", ((factor / expected - 1).abs() / tolerance).nan_to_num(0.0, 0.0), text)

    def _clear_losses(self) -> None:
        self.outputs, self.incoming, self.outgoing = [], [], []

    def step(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        self._judge_plain_backward()
        engine, audit = self.engine, self.audit
        steps, skipped, position = engine.global_steps, engine.skipped_steps, self._schedule_position()
        audit.before_step()
        result = real(*args, **kwargs)
        stepped, moved = engine.global_steps > steps, self._schedule_position() - position
        if moved not in ((0, 1) if stepped else (0,)):
            where = "of a step" if stepped else "without a step"
            audit.add(
                "options", 2.0, f"the engine moves the learning-rate schedule by {moved} at a micro-batch {where}"
            )
        if stepped:
            audit.end_step(skipped=engine.skipped_steps > skipped)
        return result

    def _schedule_position(self) -> int:
        schedule = self.engine.lr_scheduler
        return int(getattr(schedule, "last_epoch", None) or getattr(schedule, "last_batch_iteration", None) or 0)

    def load_checkpoint(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        self.audit.reset_history()
        return real(*args, **kwargs)


def wrong_scale(micro_batch: int, factor: Tensor, expected: float) -> str:
    """Returns the sentence about a loss that is scaled by a wrong factor. Waits for the device."""
    return f"the loss of micro-batch {micro_batch} is scaled by {float(factor):.4g} instead of {expected:.4g}"


def _norm(gradient: Tensor) -> Tensor:
    low = gradient.dtype in (torch.float16, torch.bfloat16)
    return torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32 if low else None).double()
