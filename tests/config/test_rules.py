"""Configurations that are refused before anything is launched."""

from __future__ import annotations

from pathlib import Path

import pytest

from cifar_zero.config import command_line, rules
from cifar_zero.core.errors import UsageError
from cifar_zero.training.resolve import announce, resolve
from tests.gpu import test_on_gpu


@pytest.fixture(autouse=True)
def machine_without_ranks(monkeypatch: pytest.MonkeyPatch):
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def refused(flags: str) -> str:
    with pytest.raises(UsageError) as error:
        resolve(command_line.parse(flags.split()))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--optimizer adam8bit", "adam8bit needs a GPU"),
        ("--optimizer muon --strategy deepspeed_stage_1", "use deepspeed_stage_0, ddp or baseline"),
        ("--optimizer muon_sgd --schedule range_test", "--schedule range_test gives all groups one learning rate"),
        ("--optimizer muon_sgd --schedule range_test", "--schedule range_test gives all groups"),
        ("--accelerator gpu", "torch finds no usable GPU"),
        ("--precision 16-mixed", "on the CPU use bf16-mixed"),
        ("--strategy deepspeed_stage_3_superoffload --optimizer adam", "use deepspeed_stage_3_offload"),
        ("--strategy deepspeed_stage_3_offload_nvme", "needs --nvme_path"),
        ("--strategy deepspeed_stage_3_offload_nvme --nvme_path /nowhere", "is not a writable directory"),
        ("--batch_size 10 --devices 2 --accumulate 4", "10"),
        ("--data.source folder --data.root /nowhere", "/nowhere"),
        ("--ds_config /nowhere.json", "cannot be read"),
        ("--devices 4096 --batch_size 4096", "a CPU rank takes about 1 GB"),
        ("--cuda_graphs", "needs a GPU"),
        ("--activation_offload", "use --activation_checkpointing"),
        ("--model net_moe --strategy deepspeed_stage_3", "use deepspeed_stage_2"),
        ("--model vit_moe --strategy deepspeed_stage_3_offload", "use deepspeed_stage_2"),
        ("--model net_moe --model.ep_size 2", "add --model.ep_size 1"),
        ("--model net_moe --model.ep_size 2 --devices 2 --strategy ddp", "add --model.ep_size 1"),
        ("--model net_moe --model.ep_size 2 --strategy deepspeed_stage_2", "does not divide the number of ranks, 1"),
        (
            "--model net_moe --model.ep_size 2 --strategy deepspeed_stage_1 --devices 3 --batch_size 3",
            "does not divide the number of ranks, 3",
        ),
        ("--strategy tensor_parallel", "cannot split --model net: it splits vit_"),
        ("--strategy pipeline --model vit_moe", "cannot split --model vit_moe"),
        (
            "--strategy tensor_parallel --model vit_tiny --devices 2",
            "2 ranks cannot divide the 3 heads of vit_tiny",
        ),
        (
            "--strategy fsdp2 --tensor_parallel_size 2 --model vit_tiny --devices 2 --batch_size 2",
            "2 ranks cannot divide the 3 heads of vit_tiny",
        ),
        (
            "--strategy fsdp2 --tensor_parallel_size 3 --model vit_small --devices 15 --batch_size 5",
            "5 ranks cannot divide the width 384",
        ),
        ("--strategy fsdp2 --tensor_parallel_size 2 --devices 2", "cannot split --model net"),
        (
            "--strategy ddp --tensor_parallel_size 2 --devices 2",
            "is for fsdp2, fsdp, tensor_parallel, not for ddp",
        ),
        ("--strategy fsdp2 --pipeline_parallel_size 2", "--pipeline_parallel_size is for pipeline, not for fsdp2"),
        (
            "--strategy pipeline --pipeline_parallel_size 3 --model vit_tiny --devices 4",
            "--pipeline_parallel_size 3 must divide the 4 ranks of --devices",
        ),
        (
            "--strategy tensor_parallel --tensor_parallel_size 2 --model vit_small --devices 4 --batch_size 3",
            "batch_size 3 = micro-batch x 2 ranks",
        ),
        ("--strategy pipeline --model vit_tiny --compile", "leave --compile out"),
        ("--strategy tensor_parallel --model vit_small --num_nodes 2", "splits a model within one node"),
        ("--strategy tensor_parallel --model vit_small --devices 2 --batch_size 3 --accumulate 2", "batch_size 3"),
    ],
)
def test_without_a_gpu(flags: str, expected: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cifar_zero.training.resolve.gpu_count", lambda: 0)
    assert expected in refused(flags)


def test_what_is_started_is_said(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setattr("cifar_zero.training.resolve.gpu_count", lambda: 0)
    monkeypatch.setattr("cifar_zero.training.resolve.core_count", lambda: 2)
    announce(resolve(command_line.parse(["--devices", "3", "--batch_size", "3", "--data.source", "digits"])))
    first, second = capfd.readouterr().err.splitlines()
    assert first == "starting: model net, strategy baseline, data digits, batch size 3, ranks 3 (cpu)"
    assert second == "warning: 3 CPU ranks take turns on 2 cores: with --devices 2 each has its own"


def test_more_devices_than_there_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cifar_zero.training.resolve.gpu_count", lambda: 2)
    assert "this computer has 2 GPUs" in refused("--devices 4")


@pytest.mark.parametrize(
    "flags",
    ["--accumulate 2", "--strategy deepspeed_stage_3", "--strategy fsdp2", "--model net_moe"],
)
def test_graphs_where_addresses_move(flags: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cifar_zero.training.resolve.gpu_count", lambda: 1)
    assert "use --compile" in refused(f"--cuda_graphs {flags}")


def test_graphs_without_offloaded_activations(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cifar_zero.training.resolve.gpu_count", lambda: 1)
    assert "leave out --activation_offload" in refused("--cuda_graphs --activation_offload")


def test_more_ranks_than_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cifar_zero.training.resolve.gpu_count", lambda: 16)
    assert "12 blocks for 13 ranks" in refused("--strategy pipeline --model vit_tiny --devices 13")


def test_float16_needs_loss_scaling(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cifar_zero.training.resolve.gpu_count", lambda: 1)
    assert "use --precision bf16-mixed" in refused("--strategy fsdp2 --precision 16-mixed")


def test_one_model_on_several_ranks_takes_the_whole_batch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cifar_zero.training.resolve.gpu_count", lambda: 0)
    flags = ["--strategy", "tensor_parallel", "--model", "vit_small", "--devices", "3", "--batch_size", "4"]
    resolve(command_line.parse(flags))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--zero.overlap_comm true", "is for ZeRO 1 to 3, not for baseline"),
        ("--zero.reduce_bucket_size 100 --strategy deepspeed_stage_0", "is for ZeRO 1 to 3, not for"),
        ("--zero.max_live_parameters 0 --strategy fsdp2", "is for ZeRO 1 to 3"),
        (
            "--strategy deepspeed_stage_2_offload --optimizer adamw --offload.ratio 0.5",
            "is for deepspeed_stage_3_offload",
        ),
        ("--strategy deepspeed_stage_3 --offload.ratio 0.5", "offloads nothing"),
        ("--strategy deepspeed_stage_3_offload --optimizer adam --offload.ratio 0.5", "with --optimizer adamw"),
        (
            "--strategy deepspeed_stage_3_offload --optimizer adamw --offload.ratio 0.5 --schedule cosine",
            "and --schedule constant",
        ),
        (
            "--strategy deepspeed_stage_3_offload --optimizer adamw --offload.ratio 0.5 --reduce_on_plateau 1",
            "without --reduce_on_plateau",
        ),
        ("--strategy deepspeed_stage_3_superoffload --optimizer adam --optimizer.weight_decay 0.1", "as AdamW does"),
        ("--strategy deepspeed_stage_3_superoffload --optimizer adamw --resume last", "start again with --weights"),
        ("--strategy deepspeed_stage_3_superoffload --optimizer adamw --precision 16-mixed", "use bf16-mixed"),
        ("--strategy deepspeed_stage_3_offload_nvme --resume last", "use --strategy deepspeed_stage_3_offload"),
    ],
)
def test_switches_of_zero_and_offload(flags: str, expected: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cifar_zero.training.resolve.gpu_count", lambda: 2)
    monkeypatch.setattr("cifar_zero.training.resolve.checkpoint_to_resume", lambda settings: settings.output.resume)
    assert expected in refused(f"{flags} --batch_size 4")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--strategy deepspeed_stage_2 --zero.overlap_comm true --devices 2", "needs a GPU"),
        ("--strategy deepspeed_stage_3_offload --optimizer adamw --offload.ratio 0.5", "--offload.* needs a GPU"),
        ("--strategy deepspeed_stage_2_offload --offload.pin_memory true", "--offload.* needs a GPU"),
    ],
)
def test_switches_that_need_a_gpu(flags: str, expected: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cifar_zero.training.resolve.gpu_count", lambda: 0)
    assert expected in refused(flags)


def test_switches_combined_with_a_raw_configuration():
    raw = "--ds_config cifar_zero/config/deepspeed_examples.json"
    assert "--zero.* and --offload.* go into cifar_zero/config" in refused(f"{raw} --zero.sub_group_size 1000")


@pytest.mark.parametrize("flags", ["--offload.ratio 1.5", "--offload.cpuadam_cores_perc 0"])
def test_switches_without_sense(flags: str):
    with pytest.raises(UsageError, match=flags.split()[0]):
        command_line.parse(flags.split())


def test_nvme_without_libaio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("ctypes.util.find_library", lambda _: None)
    assert "libaio-dev" in refused(f"--strategy deepspeed_stage_3_offload_nvme --nvme_path {tmp_path}")


def test_cpu_adam_without_a_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    assert "install g++" in refused("--strategy deepspeed_stage_2_offload --optimizer adam")


def test_eight_bits_without_bitsandbytes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cifar_zero.training.resolve.gpu_count", lambda: 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "pip install bitsandbytes" in refused("--optimizer adam8bit")


@pytest.mark.parametrize(
    ("text", "expected", "more"),
    [
        ("{", "is not JSON", ""),
        ("[]", "must hold a JSON object", ""),
        ('{"fp16": {"enabled": true}}', "--precision 16-mixed needs a GPU", "--accelerator cpu"),
        ('{"torch_autocast": {"lower_precision_safe_modules": ["evil.Layer"]}}', "use --precision", ""),
        ('{"checkpoint": {"load_universal": true}}', "use --resume", ""),
        ('{"zero_optimization": {"stage": 7}}', "a stage from 0 to 3", ""),
        ('{"zero_optimization": {"stage": 3}}', "use deepspeed_stage_2", "--model net_moe"),
    ],
)
def test_raw_configuration(text: str, expected: str, more: str, tmp_path: Path):
    file = tmp_path / "raw.json"
    file.write_text(text)
    assert expected in refused(f"--ds_config {file} {more}")


def test_what_the_gpu_tests_train_is_not_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cifar_zero.training.resolve.gpu_count", lambda: 1)
    for run in test_on_gpu.RUNS:
        config = resolve(command_line.parse([*test_on_gpu.flags_of(*run), "--data.source", "digits"]))
        assert config.placement.accelerator == "gpu"


def test_torch_2_11_cannot_split_layers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rules, "version", {"torch": "2.11.0+cpu"}.__getitem__)
    split = "--model vit_small --devices 2 --accelerator cpu --strategy"
    for flags in (f"{split} tensor_parallel", f"{split} fsdp2 --tensor_parallel_size 2"):
        assert "splits layers, which torch 2.11.0+cpu cannot: update torch" in refused(flags)
    resolve(command_line.parse(f"{split} fsdp2".split()))
