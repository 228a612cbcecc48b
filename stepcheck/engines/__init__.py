"""Defines adapters, which tell the audit which rank holds which part of a parameter, and what the user asked the engine
to do."""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stepcheck.engines.adapter import EngineAdapter, NotAuditable

__all__ = ["EngineAdapter", "NotAuditable", "adapter_of"]


def adapter_of(model: nn.Module, optimizer: Any = None) -> EngineAdapter:
    """Returns the adapter of a DeepSpeedEngine, or of a model and the optimizer that updates it. Raises NotAuditable,
    with the reason, if the audit cannot read this engine."""
    if hasattr(model, "basic_optimizer"):
        from stepcheck.engines.deepspeed import DeepSpeedAdapter

        return DeepSpeedAdapter(model)
    if optimizer is None:
        raise NotAuditable("audit(model, optimizer) needs the optimizer, unless the model is a DeepSpeedEngine")
    if any(hasattr(module, "_get_fsdp_state") for module in model.modules()):
        from stepcheck.engines.fsdp2 import FSDP2Adapter

        return FSDP2Adapter(model, optimizer)
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise NotAuditable("FSDP1 flattens parameters; use fully_shard (FSDP2)")
    from stepcheck.engines.plain import DDPAdapter, PlainAdapter

    distributed = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    return DDPAdapter(model, optimizer, distributed) if distributed else PlainAdapter(model, optimizer)
