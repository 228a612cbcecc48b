"""With round_robin_gradients, safe_get_full_fp32_param returns values of the wrong parameters.

DS_ACCELERATOR=cpu torchrun --nproc_per_node 2 reproduce.py
"""

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_set_full_fp32_param

deepspeed.init_distributed(dist_backend="gloo", verbose=False)

for stage in (1, 2):
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(4)))
    for value, parameter in enumerate(model.parameters()):
        parameter.data.fill_(value + 1.0)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
    config |= {"zero_optimization": {"stage": stage, "round_robin_gradients": True}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    expected_grads = []
    for parameter in model.parameters():
        parameter.register_hook(lambda grad, seen=expected_grads: seen.insert(0, float(grad.mean())))
    engine.backward(engine(torch.ones(1, 4)).sum())
    rows = {"parameter": ([1.0, 2.0, 3.0, 4.0], [safe_get_full_fp32_param(p).mean() for p in model.parameters()])}
    rows["gradient"] = expected_grads, [safe_get_full_grad(p).mean() for p in model.parameters()]
    safe_set_full_fp32_param(model[1].weight, torch.full((4, 4), 9.0))
    engine.step()  # copies the float32 values into the model
    rows["after setting [1]"] = [1.0, 9.0, 3.0, 4.0], [p.mean() for p in model.parameters()]
    for name, (expected, actual) in rows.items():
        if torch.distributed.get_rank() == 0:
            print(f"ZeRO {stage}, {name}: expected {expected} actual {[float(value) for value in actual]}")
