"""Measures what the audit adds to a step: `torchrun --nproc_per_node 2 -m benchmarks.audit_cost --stage 2 --bf16`.

Trains a transformer of 25 million parameters, with 2,048 tokens on each rank and micro-batch. Every second step is
audited, so that both kinds of steps share the machine's mood. Prints the medians of both and their ratio, in processor
time, which other programs disturb less than time on the clock.
"""

import argparse
import os
import resource
import statistics
import time
import warnings
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepcheck import audit

WIDTH, LAYERS, VOCABULARY, LENGTH, SEQUENCES = 512, 6, 12_000, 256, 8


class Transformer(nn.Module):
    """A language model of 25.2 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = partial(nn.TransformerEncoderLayer, WIDTH, 8, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position.weight
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def main() -> None:
    """Trains, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--weights_every", type=int, default=8)
    arguments = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore")
    torch.set_flush_denormal(True)
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.init_distributed("gloo")
    model = Transformer()
    config = {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "gradient_accumulation_steps": arguments.accumulate,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "bf16": {"enabled": arguments.bf16},
        "zero_optimization": {"stage": arguments.stage},
    }
    engine: Any = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)[0]
    audited = audit(engine, every=2, weights_every=arguments.weights_every)
    times: dict[bool, list[float]] = {True: [], False: []}
    for step in range(1, arguments.steps + 5):
        start = time.process_time()
        for _ in range(arguments.accumulate):
            ids = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH))
            engine.backward(F.cross_entropy(engine(ids).float().flatten(0, 1), ids.roll(-1, 1).flatten()))
            engine.step()
        if step > 4:
            times[step % 2 == 0].append(time.process_time() - start)
    if engine.global_rank == 0:
        plain, with_audit = (statistics.median(times[kind]) for kind in (False, True))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        hooks = audited.verdict.seconds / audited.verdict.steps
        print(
            f"ZeRO {arguments.stage}, {'bfloat16' if arguments.bf16 else 'float32'}: {1000 * plain:.0f} ms a step, "
            f"with the audit {1000 * with_audit:.0f} ms ({100 * (with_audit / plain - 1):+.1f} %), "
            f"{1000 * hooks:.0f} ms in hooks; "
            f"peak {peak:.0f} MiB\n{audited.verdict}"
        )


if __name__ == "__main__":
    main()
