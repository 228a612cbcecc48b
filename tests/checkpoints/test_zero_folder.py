"""Reads hand-written DeepSpeed folders with experts, of kinds that small runs do not produce."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cifar_zero.checkpoints.zero_folder import GROUPS, LAYOUT, PROGRESS, TAG, TIED, read_folder
from cifar_zero.core.errors import UsageError
from cifar_zero.optimizers.groups import by_name

LOCAL, RANKS = 3, 2
"""Number of experts on each rank, and number of ranks."""


def engine_name(number: int) -> str:
    return f"net.deepspeed_moe.experts.deepspeed_experts.{number}.bias"


def groups_of(rank: int, *groups: list[int]) -> list[dict[str, torch.Size]]:
    """Returns what a rank records: the gate alone, then groups of its experts."""
    experts = [{f"net.experts.{LOCAL * rank + number}.bias": torch.Size([1]) for number in group} for group in groups]
    return [{"net.gate.wg.weight": torch.Size([1])}, *experts]


def write(folder: Path, stage: int, optimizers: dict[str, Any]) -> Path:
    """Writes a checkpoint of a gate with weight -1 and six experts, each with its number as weight."""
    files = folder / TAG
    files.mkdir()
    gate = "net.deepspeed_moe.gate.wg.weight"
    main = {"module": {gate: torch.tensor([-1.0])}, "buffer_names": [], "dp_world_size": RANKS, "num_experts": [6]}
    main |= {"ds_config": {"zero_optimization": {"stage": stage}}, LAYOUT: {"ep_size": RANKS}}
    main |= {PROGRESS: [], TIED: {}}
    torch.save(main, files / "mp_rank_00_model_states.pt")
    for number in range(LOCAL * RANKS):
        expert = {engine_name(number): torch.tensor([float(number)])}
        torch.save(expert, files / f"layer_0_expert_{number}_mp_rank_00_model_states.pt")
    for name, content in optimizers.items():
        torch.save(content, files / name)
    return folder


def adam_groups(groups: list[list[int]]) -> list[dict[str, Any]]:
    return [
        {"lr": 0.1, "params": params, **({"moe": True, "name": f"ep_size_{RANKS}"} if number else {"name": "dense"})}
        for number, params in enumerate(groups)
    ]


def check(folder: Path, names: list[str]) -> None:
    """Checks that float32 weights equal the weights in the files plus 100, and that Adam's mean of the gradient equals
    the weight."""
    found = read_folder(folder)
    assert [*found["state_dict"]] == names
    expected = [-1.0, *map(float, range(LOCAL * RANKS))]
    assert [value.item() for value in found["state_dict"].values()] == [100 + value for value in expected]
    (optimizer,) = found["optimizer_states"]
    assert {name: entry["exp_avg"].item() for name, (_, entry) in by_name(optimizer).items()} == dict(
        zip(names, expected, strict=True)
    )


NAMES = ["net.gate.wg.weight", *(f"net.experts.{number}.bias" for number in range(LOCAL * RANKS))]


def test_experts_that_deepspeed_has_split_into_two_groups_are_assembled(tmp_path: Path):
    """DeepSpeed splits groups of 178,956,971 or more parameters, even in the middle of a mixture."""
    shards = {}
    for rank in range(RANKS):
        own = [float(LOCAL * rank + number) for number in range(LOCAL)]
        gate = [-1.0] if rank == 0 else []  # sharded over both ranks, but the second rank's shard is empty
        flat = [torch.tensor(values) for values in (gate, own[:2], own[2:])]
        state = {number: {"exp_avg": values, "step": torch.tensor(7.0)} for number, values in enumerate(flat)}
        base = {"state": state, "param_groups": adam_groups([[0], [1], [2]])}
        shard = {"single_partition_of_fp32_groups": [values + 100 for values in flat], "base_optimizer_state": base}
        shards[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = {
            "optimizer_state_dict": shard,
            GROUPS: groups_of(rank, [0, 1], [2]),
        }
    check(write(tmp_path, 2, shards), NAMES)


def stage_0(folder: Path) -> Path:
    ranks = {}
    for rank in range(RANKS):
        values = [-1.0, *(float(LOCAL * rank + number) for number in range(LOCAL))]
        state = {number: {"exp_avg": torch.tensor([value])} for number, value in enumerate(values)}
        base = {"state": state, "param_groups": adam_groups([[0], [1, 2, 3]])}
        masters = [[torch.tensor([values[0] + 100])], [torch.tensor([value + 100]) for value in values[1:]]]
        optimizer = {"optimizer_state_dict": base, "fp32_groups": masters}
        ranks[f"expp_rank_{rank}_mp_rank_00_optim_states.pt"] = {
            "optimizer": optimizer,
            GROUPS: groups_of(rank, [0], [1], [2]),
        }
    return write(folder, 0, ranks)


def test_stage_0_in_16_bits_is_assembled(tmp_path: Path):
    check(stage_0(tmp_path), NAMES)


@pytest.mark.parametrize(
    "file", ["expp_rank_0_mp_rank_00_optim_states.pt", "layer_0_expert_4_mp_rank_00_model_states.pt"]
)
def test_a_missing_file_is_refused(file: str, tmp_path: Path):
    folder = stage_0(tmp_path)
    (folder / TAG / file).unlink()
    with pytest.raises(UsageError, match="is incomplete"):
        read_folder(folder)
