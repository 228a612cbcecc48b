"""What fine-tuning costs: all of vit_tiny, its head, LoRA of several ranks, a process each; prints a Markdown table.

python -m benchmarks.finetuning
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

from cifar_zero.checkpoints.finetuning.network import build
from cifar_zero.config.flags import Choice, LoRAConfig
from cifar_zero.training.callbacks.counts import trained_count, training_flops
from cifar_zero.training.callbacks.memory import peak_bytes
from cifar_zero.training.callbacks.model_state import model_states

MODEL, NUM_CLASSES, BATCH_SIZE = Choice("vit_tiny"), 10, 32
WARMUP_STEPS, STEPS = 1, 5

TARGET = ["blocks.*.attention.qkv", "blocks.*.attention.out"]
VARIANTS: dict[str, tuple[list[str], LoRAConfig]] = {
    "everything": ([], LoRAConfig()),
    "head": (["head.*"], LoRAConfig()),
    **{f"LoRA, rank {rank}, and head": (["head.*"], LoRAConfig(rank, target=TARGET)) for rank in (4, 8, 16)},
}
"""Patterns of what is trained, and adapters, as --trainable and --lora.* have them."""


def measure(variant: str) -> str:
    """A row of the table, measured in this process on one core: the fastest step, by its time on the processor."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainable, lora = VARIANTS[variant]
    net = build(MODEL, NUM_CLASSES, trainable, lora)
    images, labels = torch.randn(BATCH_SIZE, 3, 32, 32), torch.arange(BATCH_SIZE) % NUM_CLASSES
    optimizer = torch.optim.AdamW(parameter for parameter in net.parameters() if parameter.requires_grad)
    seconds: list[float] = []
    for _ in range(WARMUP_STEPS + STEPS):
        begun = time.process_time()
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()
        seconds.append(time.process_time() - begun)
    trained = trained_count(MODEL, NUM_CLASSES, trainable, lora)
    weights = sum(parameter.nbytes for parameter in net.parameters())
    beside = sum(model_states(net, optimizer)) - weights
    flops = training_flops(MODEL, NUM_CLASSES, BATCH_SIZE, trainable, lora)
    figures = [f"{trained:,}", f"{beside / 1e6:.2f} MB", f"{peak_bytes(torch.device('cpu')) / 1e6:,.0f} MB"]
    figures += [f"{flops / 1e9:.1f}", f"{1000 * min(seconds[WARMUP_STEPS:]):,.0f} ms"]
    return f"| {' | '.join([variant, *figures])} |"


def main() -> None:
    """Prints the table, or the one row that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variant", nargs="?", choices=VARIANTS, help="one row alone")
    if variant := parser.parse_args().variant:
        print(measure(variant))
        return
    print("| trained | parameters | gradients and optimizer | peak of the process | GFLOP a step | a step |")
    print("|---|---|---|---|---|---|", flush=True)
    for variant in VARIANTS:
        subprocess.run([sys.executable, "-m", "benchmarks.finetuning", variant], check=True)


if __name__ == "__main__":
    main()
