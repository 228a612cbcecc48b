"""The registry of optimizers: each a dataclass whose fields are the `--optimizer.<option>` flags.

The strategy chooses the implementation: torch's own, DeepSpeed's on the CPU where the optimizer is offloaded, or
DeepSpeed's fused Adam on CUDA. Reading the registry imports neither torch nor DeepSpeed.
"""

from cifar_zero.optimizers.muon import Muon, MuonSGD
from cifar_zero.optimizers.options import SGD, Adadelta, Adagrad, Adam, Adam8bit, AdamW, Lion, OptimizerOptions, RMSprop

OPTIMIZERS: dict[str, type[OptimizerOptions]] = {
    "sgd": SGD,
    "adam": Adam,
    "adamw": AdamW,
    "rmsprop": RMSprop,
    "adagrad": Adagrad,
    "adadelta": Adadelta,
    "lion": Lion,
    "muon": Muon,
    "muon_sgd": MuonSGD,
    "adam8bit": Adam8bit,
}

BY_DEEPSPEED = "DeepSpeed's C++"

OFFLOADED_BY = {
    "sgd": "torch",
    "adam": BY_DEEPSPEED,
    "adamw": BY_DEEPSPEED,
    "rmsprop": "torch",
    "adagrad": "torch",
    "adadelta": "torch",
    "lion": "torch",
}
"""The code that updates on the CPU when a strategy offloads the optimizer. The other optimizers need whole tensors, and
cannot run under ZeRO stages 1 to 3, which flatten the tensors and cut them into shards."""
