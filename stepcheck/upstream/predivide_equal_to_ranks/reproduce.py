"""ZeRO 3 with gradient_predivide_factor equal to the number of ranks divides the gradients by it once too often.

DS_ACCELERATOR=cpu torchrun --nproc_per_node 2 reproduce.py
"""

import deepspeed
import torch

deepspeed.init_distributed(dist_backend="gloo", verbose=False)


def change(stage: int, factor: float) -> float:
    """Returns how far one step of SGD with lr 1 moves a weight whose gradient is 1 on each rank."""
    model = torch.nn.Linear(4, 4)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_predivide_factor": factor, "gradient_clipping": 0.0}
    config |= {"zero_optimization": {"stage": stage, "reduce_scatter": False}, "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=config)
    before = deepspeed.utils.safe_get_full_fp32_param(model.weight).clone()
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    return round(float((before - deepspeed.utils.safe_get_full_fp32_param(model.weight)).mean()), 4)


for stage in (1, 2, 3):
    for factor in (1.0, 2.0, 4.0):
        actual = change(stage, factor)
        if torch.distributed.get_rank() == 0:
            print(f"2 ranks, ZeRO {stage}, gradient_predivide_factor {factor}: expected 1.0 actual {actual}")
