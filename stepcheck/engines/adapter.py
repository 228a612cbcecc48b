"""Defines what an audit reads from an engine."""

import importlib
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")

TRANSFORMS: Any = importlib.import_module("torch._C._functorch")
"""The module with the stack of torch.func's transforms, such as `grad` and `vmap`."""

STEP_CODE = torch.optim.Optimizer.profile_hook_step(print).__code__
"""The code of the function with which torch replaces an optimizer's `step`, to call hooks before and after it."""


class NotAuditable(ValueError):
    """Raised for an engine that the audit cannot read."""


def plain_name(model: nn.Module, name: str) -> str:
    """Returns the name of a module or tensor of a model, without the parts that DDP, DataParallel and torch.compile
    add."""
    owner: Any = model
    parts = []
    for part in name.split("."):
        added = part == "module" and isinstance(owner, DistributedDataParallel | nn.DataParallel)
        if not added and part != "_orig_mod":
            parts.append(part)
        owner = getattr(owner, part, None)
    return ".".join(parts)


def hookable_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the module and its submodules with their names, except those in TorchScript, which cannot have hooks."""
    return ((name, part) for name, part in module.named_modules() if not isinstance(part, torch.jit.ScriptModule))


def tensors_in(nested: Any) -> list[Tensor]:
    """Returns the tensors in nested lists, tuples and dictionaries. The outermost container may be any Mapping, such as
    an output of transformers."""
    leaves = tree_leaves(dict(nested) if isinstance(nested, Mapping) else nested)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


class Hook:
    """A hook of an audit. It does nothing while torch traces a call (torch.compile, torch.func or torch.jit.trace). A
    copy or pickle of the module gets a hook that never does anything, because it belongs to another training or to a
    program without stepcheck."""

    def __init__(self, call: Callable[..., Any]):
        self.call = call

    def __call__(self, *args: Any) -> Any:
        traces = torch.compiler.is_compiling() or TRANSFORMS.peek_interpreter_stack() is not None
        if traces or torch._C._get_tracing_state() is not None:
            return None
        return self.call(*args)

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")


def same_values(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors have the same shape and values. NaN equals NaN. The dtypes may differ."""
    if one.shape != other.shape:
        return False
    if torch.equal(one, other):
        return True
    return one.is_floating_point() and torch.allclose(one, other.to(one), rtol=0, atol=0, equal_nan=True)


@dataclass(frozen=True)
class Part:
    """A contiguous part of a parameter within a tensor of the optimizer. All numbers count elements."""

    index: int  # of the parameter in `EngineAdapter.parameters`
    start: int  # in the flattened parameter
    offset: int  # in the flattened tensor of the optimizer
    length: int


@dataclass(frozen=True)
class Target:
    """A tensor that the optimizer updates: a parameter, a shard of it, or shards of several parameters."""

    tensor: Tensor
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class RankInfo:
    """This rank, its device, and the number of ranks that train together, which is 1 without torch.distributed."""

    rank: int
    size: int
    device: torch.device = CPU

    @classmethod
    def current(cls, device: torch.device = CPU) -> "RankInfo":
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size(), device)
        return cls(0, 1, device)

    def all_gather(self, own: Any) -> list[Any]:
        """Returns each rank's object, in rank order. Every rank must call it."""
        everyone: list[Any] = [own]
        if self.size > 1:
            everyone = [None] * self.size
            # NCCL sends from the current GPU, and a script may not have set it.
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                dist.all_gather_object(everyone, own)
        return everyone

    def first(self, text: str) -> str:
        """Returns the first text of all ranks that is not empty, in rank order, or "". Every rank must call it."""
        return next(filter(None, self.all_gather(text)), "")

    def __str__(self) -> str:
        return "1 rank" if self.size == 1 else f"{self.size} ranks"


class EngineAdapter:
    """Reads a model and a torch optimizer in one process. Subclasses override what other engines do differently."""

    gathers = False
    """Whether a module's weights are unsharded only while the module computes."""

    owns_step = False
    """Whether the engine's own `step` calls the optimizer."""

    def __init__(self, module: nn.Module, optimizer: Any):
        self.module, self._optimizer = module, weakref.ref(optimizer)
        trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
        named = dict(module.named_parameters())
        self.names = [plain_name(module, name) for name in named]
        self.parameters: list[Any] = list(named.values())
        self.ranks = RankInfo.current(self.device)
        self.index_of = {id(each): index for index, each in enumerate(self.parameters)}
        self.trained = {self.index_of[each] for each in self.index_of.keys() & trained}
        self.rows = list(range(len(self.parameters)))
        """The row of each parameter in the matrix of sketches. Experts of different ranks have separate rows."""
        self.row_names, self.index_of_row = [*self.names], [*self.rows]
        self.targets = {id(each.tensor): each for each in self.find_targets()}
        """The tensors that this rank's optimizer updates, by their id."""

    @property
    def optimizer(self) -> Any:
        """The optimizer, or None after the script has dropped it."""
        return self._optimizer()

    @property
    def label(self) -> str:
        return "plain PyTorch"

    @property
    def device(self) -> torch.device:
        return next((each.device for each in self.parameters), CPU)

    def find_targets(self) -> Iterator[Target]:
        for index in sorted(self.trained):
            values, start = self.own_part(index)
            yield Target(self.parameters[index], (Part(index, start, 0, values.numel()),))

    def parameter_groups(self) -> dict[int, dict[str, Any]]:
        """Returns the parameter group of each parameter of which this rank's optimizer updates a part, by parameter
        index."""
        groups = {id(tensor): group for group in self.optimizer.param_groups for tensor in group["params"]}
        pairs = ((groups.get(id(target.tensor)), target.parts) for target in self.targets.values())
        return {part.index: group for group, parts in pairs if group for part in parts}

    def begin_micro_batch(self) -> str:
        """Is called before each forward pass. Returns why the audit must end on all ranks before this forward pass, or
        an empty string."""
        return ""

    def gradients_before_pass(self, summed: Collection[int]) -> dict[int, Tensor | None]:
        """Is called at the first gradient of each backward pass, before this gradient is added. Returns the gradients
        with which sums of gradients begin anew, by parameter index. With None, a sum begins with 0. The sums of all
        other parameters continue.

        Args:
            summed: Indices of the parameters whose sums have begun in this step.
        """
        return {}

    def own_part(self, index: int) -> tuple[Tensor, int]:
        """Returns this rank's part of a parameter (flat under ZeRO 3, otherwise with the parameter's dimensions), and
        the index of the part's first element in the flattened parameter."""
        return self.parameters[index].detach(), 0

    def replica(self, index: int) -> tuple[int, int]:
        """Returns this rank's number, from 0, among the ranks that hold the same part of a gradient, and how many they
        are."""
        return 0, 1

    def weight_replicas(self, index: int) -> int:
        """Returns the number of ranks that hold the same part of a weight, as the optimizer has it."""
        return self.replica(index)[1]

    syncs_buffers = False
    """Whether the forward pass copies the buffers of rank 0 to the other ranks."""

    def shape(self, index: int) -> torch.Size:
        """Returns the unsharded shape of a parameter."""
        return self.parameters[index].shape

    def full_weight(self, index: int) -> Tensor:
        """Returns a copy of an unsharded parameter, as the forward pass uses it. Every rank must call it."""
        return self.parameters[index].detach().clone()

    def prepare_copy(self, copy: nn.Module) -> None:
        """Changes a plain copy of the module in place, so that it computes as the engine does. The copy was made before
        the engine was built."""

    def compute_dtype(self, index: int) -> torch.dtype:
        """Returns the dtype in which a parameter is used in the forward pass."""
        return self.parameters[index].dtype

    def rounding_dtypes(self) -> set[torch.dtype]:
        """Returns the dtypes in which gradients are added and sent."""
        return {self.parameters[index].dtype for index in self.trained or range(len(self.parameters))}

    def loss_scale(self) -> float:
        """Returns the factor, such as float16's loss scale, by which autograd's gradients exceed the gradients that
        reach the optimizer."""
        return 1.0

    divides_loss = True
    """Whether the engine must divide each loss by the number of micro-batches. Under Lightning it must not, because
    Lightning divides."""

    divisor: float = 1.0
    """The number by which the engine is expected to divide each loss, apart from multiplying it by the loss scale."""

    def reduction_factor(self) -> float:
        """Returns the configured ratio of the reduced gradient to the mean over the ranks."""
        return 1.0

    clips_others = False
    """Whether clip_grad_norm_ has clipped all gradients of this step together with gradients of other parameters."""

    def clip_limit(self) -> float:
        """Returns the norm to which all gradients together are clipped if their norm is larger, or 0 without
        clipping."""
        return 0.0

    def given_options(self) -> dict[int, dict[str, Any]]:
        """Returns the optimizer options in an engine's configuration, by parameter index, as the user wrote them. It is
        empty if the script has built the optimizer."""
        return {}

    def local(self, tensor: Tensor) -> Tensor:
        """Returns this rank's part of a tensor of the optimizer."""
        return tensor

    def after_backward(self) -> None:
        """Records the gradients at the end of a backward pass."""

    modified_because = "the script has set them, or clipped them other than by the norm of all gradients"
    """Why gradients at the step may not be those that the backward pass has left."""

    def modified_gradients(self) -> set[int]:
        """Returns the indices of the parameters whose gradients have changed between the backward pass and the step,
        other than by torch's unscaling or its clipping of all gradients by their norm."""
        return set()

    def removed_gradients(self) -> set[int]:
        """Returns the indices of the parameters whose gradients the script has set to None since the backward pass."""
        return set()

    def attach(self, audit: Any) -> None:
        """Makes the engine call the audit at each step, until the audit is detached."""
        self._before_step = before = self.optimizer.register_step_pre_hook(Hook(partial(_before_update, audit)))
        after = self.optimizer.register_step_post_hook(Hook(partial(_after_update, audit)))
        # Before the script's own hooks, which may change the updated weights.
        self.optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)
        loading = self.optimizer.register_load_state_dict_pre_hook(lambda *_: audit.reset_history())
        for handle in (before, after, loading):
            audit.undo.callback(handle.remove)

    def move_hook_last(self) -> None:
        """Makes the optimizer's step call the audit after the hooks that the script has registered since `attach`."""
        self.optimizer._optimizer_step_pre_hooks.move_to_end(self._before_step.id)


def _before_update(audit: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Passes the gradients that reach an optimizer to the audit, before its step or after the closure that computes
    them, as in Lightning. Returns the arguments of the step if they must be replaced."""
    if running_steps(optimizer) > 1:
        return None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        audit.before_update(optimizer)
        return None
    calls = 0

    def audited() -> Any:
        nonlocal calls
        calls += 1
        result = closure()
        if calls == 1:
            audit.before_update(optimizer)
        elif calls == 2:
            audit.stop(f"{type(optimizer).__name__} calls its closure several times in a step")
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": audited}
    return (args[0], audited, *args[2:]), kwargs


def _after_update(audit: Any, optimizer: Any, *_: Any) -> None:
    if running_steps(optimizer) == 1:
        audit.after_update(optimizer)


def records_cuda_graph() -> bool:
    """Returns whether the device records what it is given, instead of computing it. A wait for the device would end the
    recording with an error."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def running_steps(optimizer: Any) -> int:
    """Returns how many calls of an optimizer's `step` have not returned. It is 2 if a step has called the step of its
    base class, for which torch calls the hooks again. Reads the stack, because no hook is called after a step that has
    failed."""
    frame, count = sys._getframe(), 0
    while frame is not None:
        count += frame.f_code is STEP_CODE and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return count
