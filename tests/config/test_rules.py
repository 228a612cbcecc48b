"""Configurations that are refused before anything is launched."""

import pytest

from cifar_zero.config import command_line
from cifar_zero.training.resolve import resolve
from tests.support.helpers import refused

SUPER = "--strategy deepspeed_stage_3_superoffload --optimizer"
NVME = "--strategy deepspeed_stage_3_offload_nvme"


@pytest.mark.parametrize(
    ("gpus", "flags", "expected"),
    [
        (0, "--optimizer muon --strategy deepspeed_stage_1", "use deepspeed_stage_0, ddp or baseline"),
        (0, "--optimizer muon_sgd --schedule range_test", "--schedule range_test sets one learning rate"),
        (0, "--accelerator gpu", "torch finds no usable GPU"),
        (2, "--devices 4", "this computer has only 2 GPUs"),
        (0, "--devices 4096 --batch_size 4096", "a CPU rank takes about 1 GB"),
        (0, "--precision 16-mixed", "on the CPU use bf16-mixed"),
        (1, "--strategy fsdp2 --precision 16-mixed", "use --precision bf16-mixed"),
        (1, "--strategy deepspeed_stage_0 --precision 16-mixed", "does not scale losses in float16"),
        (0, "--batch_size 10 --devices 2 --accumulate 4", "use --batch_size 8 or 16"),
        (0, "--batch_size 3 --accumulate 4", "use --batch_size 4"),
        (0, "--data.source folder --data.root /nowhere", "/nowhere"),
        (0, "--weights /nowhere.pt", "/nowhere.pt does not exist"),
        (0, "--lora.target fc1", "--lora.rank must be at least 1, not 0"),
        (0, "--lora.rank 8", "--lora.rank needs --lora.target"),
        (0, "--model resnet18 --trainer.sync_batchnorm true", "--trainer.sync_batchnorm works only with ddp on GPUs"),
        (
            0,
            "--strategy ddp --devices 2 --trainer.val_check_interval 00:00:10:00",
            "--trainer.val_check_interval 00:00:10:00 needs one rank",
        ),
        (0, "--activation_offload", "use --activation_checkpointing"),
        (0, "--cuda_graphs", "needs a GPU"),
        (1, "--cuda_graphs --accumulate 2", "use --compile"),
        (1, "--cuda_graphs --strategy deepspeed_stage_3", "use --compile"),
        (1, "--cuda_graphs --model net_moe", "use --compile"),
        (1, "--cuda_graphs --activation_offload", "leave out --activation_offload"),
        (0, "--model net_moe --strategy deepspeed_stage_3", "use deepspeed_stage_2"),
        (0, "--model net_moe --model.ep_size 2", "add --model.ep_size 1"),
        (0, "--model net_moe --model.ep_size 2 --strategy deepspeed_stage_2 --devices 1", "the number of ranks, 1"),
        (
            0,
            "--model net_moe --model.ep_size 2 --devices 2 --strategy deepspeed_stage_2 --init he",
            "--init he needs all experts",
        ),
        (0, "--strategy tensor_parallel", "cannot split --model net: use a vit_"),
        (0, "--strategy pipeline --model vit_moe", "cannot split --model vit_moe"),
        (0, "--strategy tensor_parallel --model vit_tiny --devices 2", "2 ranks cannot divide the 3 heads of vit_tiny"),
        (
            0,
            "--strategy fsdp2 --tensor_parallel_size 3 --model vit_small --devices 15 --batch_size 5",
            "5 ranks cannot divide the width 384",
        ),
        (
            0,
            "--strategy ddp --tensor_parallel_size 2 --devices 2",
            "works only with fsdp2, fsdp, tensor_parallel, not with ddp",
        ),
        (
            0,
            "--strategy pipeline --pipeline_parallel_size 3 --model vit_tiny --devices 4",
            "--pipeline_parallel_size 3 must divide the 4 ranks of --devices",
        ),
        (
            0,
            "--strategy tensor_parallel --tensor_parallel_size 2 --model vit_small --devices 4 --batch_size 3",
            "--batch_size 3 is not a multiple of 2 ranks",
        ),
        (16, "--strategy pipeline --model vit_tiny --devices 13", "12 blocks for 13 ranks"),
        (0, "--strategy pipeline --model vit_tiny --compile", "leave out --compile"),
        (0, "--strategy tensor_parallel --model vit_small --num_nodes 2", "splits a model within one node"),
        (2, "--strategy fsdp2 --devices 2 --ema 0.5", "use deepspeed_stage_3"),
        (0, "--zero.reduce_bucket_size 100 --strategy deepspeed_stage_0", "works only with ZeRO 1 to 3, not with"),
        (0, "--strategy deepspeed_stage_2 --zero.overlap_comm true --devices 2", "needs a GPU"),
        (2, "--strategy deepspeed_stage_3 --offload.pin_memory true", "does not offload"),
        (0, "--strategy deepspeed_stage_3_offload --offload.pin_memory true", "--offload.* needs a GPU"),
        (0, f"{SUPER} adamw --offload.cpuadam_cores_perc 1.5", "--offload.cpuadam_cores_perc must be"),
        (0, f"{SUPER} adam", "use deepspeed_stage_3_offload"),
        (2, f"{SUPER} adam --optimizer.weight_decay 0.1", "as AdamW does"),
        (2, f"{SUPER} adamw --resume last", "start again with --weights"),
        (2, f"{SUPER} adamw --precision 16-mixed", "use bf16-mixed"),
        (0, NVME, "--nvme_path is missing"),
        (0, f"{NVME} --nvme_path /nowhere", "is not a writable directory"),
        (2, f"{NVME} --resume last", "use --strategy deepspeed_stage_3_offload"),
        (0, "--ds_config /nowhere.json", "cannot be read"),
        (
            0,
            "--ds_config cifar_zero/config/deepspeed_examples.json --zero.sub_group_size 1000",
            "instead of --zero.* and --offload.*, set DeepSpeed's options in cifar_zero/config",
        ),
    ],
)
def test_a_run_that_cannot_work_is_refused(gpus: int, flags: str, expected: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cifar_zero.training.resolve.gpu_count", lambda: gpus)
    monkeypatch.setattr("cifar_zero.training.resolve.checkpoint_to_resume", lambda settings: settings.output.resume)
    with refused(expected):
        resolve(command_line.parse(flags.split()))
