"""ZeRO 0 in bfloat16 takes one optimizer step with zero gradients before the training: Adam counts one step too many.

DS_ACCELERATOR=cpu torchrun --nproc_per_node 2 reproduce.py
"""

import deepspeed
import torch

deepspeed.init_distributed(dist_backend="gloo", verbose=False)


def weights(engine_is_deepspeed: bool) -> torch.Tensor:
    """Returns the weights after one step of AdamW with lr 0.01, weight_decay 0.5 and a gradient of 1."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1, bias=False).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    images = torch.ones(1, 4, dtype=torch.bfloat16)
    if engine_is_deepspeed:
        config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}
        config |= {"zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        engine.backward(engine(images).sum())
        engine.step()
        counts = {int(state["step"]) for state in engine.basic_optimizer.state.values()}
    else:  # the same gradient on each rank, so that their mean is the gradient of one
        master = model.weight.detach().float().requires_grad_()
        optimizer = torch.optim.AdamW([master], lr=0.01, weight_decay=0.5)
        master.grad = torch.ones_like(master)
        optimizer.step()
        model.weight.data.copy_(master)
        counts = {int(state["step"]) for state in optimizer.state.values()}
    if torch.distributed.get_rank() == 0:
        print("DeepSpeed" if engine_is_deepspeed else "PyTorch  ", "Adam's step count after one step:", *counts)
    return model.weight.detach().float()


expected, actual = weights(False), weights(True)
if torch.distributed.get_rank() == 0:
    print("weights: expected", expected.tolist(), "actual", actual.tolist(), sep="\n")
