"""A layer that some micro-batches do not use: an earlier gradient is applied again, or its gradient is lost.

DS_ACCELERATOR=cpu torchrun --nproc_per_node 2 reproduce.py
"""

from itertools import pairwise

import deepspeed
import torch

deepspeed.init_distributed(dist_backend="gloo", verbose=False)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x, uses):
        return (self.always(x) + (self.sometimes(x) if uses else 0)).sum()


def changes(zero: dict, accumulate: int, uses: str) -> list[float]:
    """Returns how far SGD with lr 1 moves `sometimes` in each step. Its gradient is 1 in a micro-batch "u", else 0."""
    model = Model()
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulate, "zero_optimization": zero}
    config |= {"gradient_clipping": 0.0, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=config)
    get = deepspeed.utils.safe_get_full_fp32_param
    weights = [get(model.sometimes.weight).clone()]
    for index, use in enumerate(uses, 1):
        engine.backward(engine(torch.ones(1, 4), use == "u"))
        engine.step()
        if index % accumulate == 0:
            weights.append(get(model.sometimes.weight).clone())
    return [round(float((a - b).mean()), 2) for a, b in pairwise(weights)]


CASES = (("step 2 rests", 1, "u-", [1, 0]), ("last rests", 2, "u-", [0.5]), ("first rests", 2, "uu-u", [1, 0.5]))
for stage, device in ((2, "none"), (3, "none"), (1, "cpu"), (2, "cpu"), (3, "cpu")):
    for name, accumulate, uses, expected in CASES:
        actual = changes({"stage": stage, "offload_optimizer": {"device": device}}, accumulate, uses)
        if torch.distributed.get_rank() == 0:
            print(f"ZeRO {stage}, offload {device}, {name}: expected {expected} actual {actual}")
