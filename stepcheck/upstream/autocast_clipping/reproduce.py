"""With torch_autocast in float16, ZeRO 1 to 3 clip gradients that still contain the loss scale.

DS_ACCELERATOR=cpu torchrun --nproc_per_node 2 reproduce.py
"""

import deepspeed
import torch

deepspeed.init_distributed(dist_backend="gloo", verbose=False)


def change(stage: int, limit: float) -> float:
    """Returns the norm of one step of SGD with lr 1 for a weight whose gradient has the norm 1."""
    model = torch.nn.Linear(4, 1, bias=False)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": limit, "zero_optimization": {"stage": stage}}
    config |= {"torch_autocast": {"enabled": True, "dtype": "float16"}, "zero_allow_untested_optimizer": True}
    torch.distributed.broadcast(model.weight.data, 0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=config)
    engine.backward(engine(torch.full((1, 4), 2.0)).float().sum() / 4)
    before = deepspeed.utils.safe_get_full_fp32_param(model.weight).clone() if stage else model.weight.detach().clone()
    engine.step()
    after = deepspeed.utils.safe_get_full_fp32_param(model.weight) if stage else model.weight.detach()
    return float((after - before).norm())


for stage in (0, 1, 2, 3):
    for limit in (0.0, 0.1):
        actual, expected = change(stage, limit), limit or 1.0
        if torch.distributed.get_rank() == 0:
            print(f"ZeRO {stage}, gradient_clipping {limit}: expected {expected} actual {actual:.3g}")
