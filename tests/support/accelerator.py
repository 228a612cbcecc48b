"""A device for tests that fails as a GPU does, on a machine without one.

Its tensors hold their values in memory of the CPU, and torch sees them on another device. An operation on tensors of
two devices raises an error, unless a tensor from the CPU has no dimensions, as on a GPU. Whatever makes a GPU's host
wait is counted: reading a value (`.item()`, `if tensor`), and copying to the CPU. Works with autograd. C++ code that
reads memory, such as DDP's reducer, cannot use it.
"""

import types
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "fake_gpu"

waits: Counter[str] = Counter()
"""How often the host had to wait for the device, by operation."""

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default}
SPECIAL = ("sparse", "quantized", "cudnn", "mkldnn", "nested", "from_file", "dep_token")
"""Words in the names of operations that make special tensors."""

COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


class DeviceTensor(torch.Tensor):
    """A tensor on the device. `values` holds its values on the CPU."""

    values: Any

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> "DeviceTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=torch.device(NAME, 0),
        )
        made.values = values
        return made

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.detach()

    @data.setter
    def data(self, new: "DeviceTensor") -> None:
        torch.Tensor.data.__set__(self, new)  # pyright: ignore
        self.values = new.values

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"DeviceTensor({self.values})"

    def __format__(self, spec: str) -> str:
        return format(self.values, spec)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READS:
            waits[str(func)] += 1
        to_cpu = func in COPIES and _goes_to_cpu(func, args, kwargs)
        if to_cpu:
            waits[str(func)] += 1
        if func not in COPIES:
            _refuse_two_devices(func, args, kwargs)
        result = func(*_unwrapped(args), **_on_cpu(_unwrapped(kwargs)))
        if to_cpu or not isinstance(func, torch._ops.OpOverload):
            return args[0] if func is torch.ops.aten.copy_.default else result
        result = tree_map_only(torch.Tensor, DeviceTensor, result)
        return return_and_correct_aliasing(func, args, kwargs, result)


def _goes_to_cpu(func: Any, args: Any, kwargs: Any) -> bool:
    if func is torch.ops.aten.copy_.default:
        return not isinstance(args[0], DeviceTensor)
    return str(kwargs.get("device", NAME)).startswith("cpu")


def _refuse_two_devices(func: Any, args: Any, kwargs: Any) -> None:
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
    others = [each for each in tensors if not isinstance(each, DeviceTensor) and each.dim()]
    if others and len(others) < len(tensors):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, but one is on {others[0].device}")


def _unwrapped(nested: Any) -> Any:
    return tree_map_only(DeviceTensor, lambda each: each.values, nested)


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") is not None else kwargs


def _factory(op: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return DeviceTensor(op(*args, **{**kwargs, "device": torch.device("cpu")}))

    return make


def _factories() -> Any:
    """Yields the operations that make a tensor of none."""
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if not name.startswith("aten::") or op is None:
            continue
        arguments = op._schema.arguments
        kinds = [str(each.type) for each in arguments]
        makes = [str(each.type) for each in op._schema.returns] == ["Tensor"] and not any("Tensor" in k for k in kinds)
        if makes and any(each.name == "device" for each in arguments) and not any(word in name for word in SPECIAL):
            yield name.removeprefix("aten::"), op


def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
    return DeviceTensor.__torch_dispatch__(torch.ops.aten.copy_.default, (), (target, source))


_library: list[Any] = []  # registrations live as long as it


def install() -> torch.device:
    """Registers the device, once in a process. Returns it."""
    if not _library:
        module = types.ModuleType(f"torch.{NAME}")
        module.is_available = module.is_initialized = lambda: True  # pyright: ignore
        module.device_count, module.current_device = lambda: 1, lambda: 0  # pyright: ignore
        module._is_in_bad_fork = lambda: False  # pyright: ignore
        module.get_amp_supported_dtype = lambda: [torch.bfloat16]  # pyright: ignore
        module.manual_seed_all = lambda seed: None  # pyright: ignore
        _setup_privateuseone_for_python_backend(NAME, backend_module=module)
        library = torch.library.Library("aten", "IMPL")
        for name, op in _factories():
            library.impl(name, _factory(op), "PrivateUse1")
        library.impl("_copy_from", _copy_from, "PrivateUse1")
        torch.__future__.set_swap_module_params_on_conversion(True)
        _library.append(library)
    return torch.device(NAME, 0)
