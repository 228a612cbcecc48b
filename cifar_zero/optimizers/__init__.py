"""The registry of optimizers: each a dataclass whose fields are the `--optimizer.<option>` flags.

The strategy chooses the implementation: torch's own, DeepSpeed's on the CPU where the optimizer is offloaded, or
DeepSpeed's fused Adam on CUDA. Reading the registry imports neither torch nor DeepSpeed.
"""

from cifar_zero.optimizers import options

OPTIMIZERS: dict[str, type[options.OptimizerOptions]] = {
    "sgd": options.SGD,
    "adam": options.Adam,
    "adamw": options.AdamW,
    "rmsprop": options.RMSprop,
    "adagrad": options.Adagrad,
    "adadelta": options.Adadelta,
    "lion": options.Lion,
    "muon": options.Muon,
    "muon_sgd": options.MuonSGD,
    "adam8bit": options.Adam8bit,
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
