from __future__ import annotations

import json
from pathlib import Path

import pytest

from comparison.result import Comparison, Curve, Difference, ModelStates, Run, Spread, Variant, Verdict, read, write
from errors import UsageError


def whole() -> Comparison:
    """With something in every field, and fractions that binary has not."""
    run = Run(
        folder="runs/net-ddp/version_0",
        seed=1,
        metrics={"test/acc": 0.1, "epochs": 2, "test/acc_per_class": {"cat": 1 / 3, "dog": None}, "ranks": [1, 2.5]},
        losses=Curve([1, 2], [2.302585092994046, 1e-45]),
        curves={"val/acc": Curve([2], [0.3], [12.75])},
        checkpoint_bytes=2**40 + 1,
        seconds_to_accuracy=12.75,
        effective={"compute_dtype": "torch.float32", "skipped_steps": 0},
    )
    variant = Variant(
        name="ddp",
        strategy="ddp",
        world_size=2,
        accumulate=4,
        command="python train.py --strategy ddp",
        runs=[run],
        figures={"test/acc": Spread(0.1, 0.05, 0.15)},
        predicted=ModelStates(4, 8, 16),
        verdict=Verdict("different", 0.5, 1e-6, 0.25, 2e-6, 3, 4, ["overlap_comm is on."]),
    )
    failed = Variant("fsdp", "fsdp", 2, 1, "python train.py --strategy fsdp", error="error: no GPU")
    return Comparison(
        title="net",
        command="python compare.py",
        created="2026-01-02T03:04:05+00:00",
        machine={"torch": "2.15.0"},
        recipe={"model": "net"},
        reference="ddp",
        variants=[variant, failed],
        differences=[Difference("epochs", {"ddp": "2", "fsdp": "3"})],
        target_accuracy=0.5,
        notes=["The bounds come from the precision alone."],
        rounding=Curve([1, 2], [1e-7, 2e-7]),
    )


def test_a_comparison_comes_back_as_it_was_written(tmp_path: Path):
    file = tmp_path / "comparison.json"
    write(whole(), file)
    assert read(file) == whole()


def test_a_run_that_diverged_comes_back(tmp_path: Path):
    diverged = whole()
    diverged.variants[0].runs[0].losses = Curve([1, 2], [float("inf"), float("nan")])
    write(diverged, tmp_path / "comparison.json")
    assert {"Infinity", "NaN"}.isdisjoint((tmp_path / "comparison.json").read_text().split()), "JSON has neither"
    assert all(value != value for value in read(tmp_path / "comparison.json").variants[0].runs[0].losses.values)


def test_a_comparison_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "comparison.json"
    write(whole(), file)
    changed = whole()
    changed.notes = [object()]  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        write(changed, file)
    assert read(file) == whole()


def test_keys_that_came_later_do_not_matter(tmp_path: Path):
    file = tmp_path / "comparison.json"
    write(whole(), file)
    content = json.loads(file.read_text())
    content["later"] = content["variants"][0]["later"] = 1
    file.write_text(json.dumps(content))
    assert read(file) == whole()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "is not a comparison.json"),
        ("[]", "is not a comparison.json"),
        ('{"schema": 1, "title": "net"}', "is not a comparison.json"),
        ('{"schema": 99}', "schema 99"),
    ],
)
def test_what_is_no_comparison_is_named_in_one_line(tmp_path: Path, content: str | None, message: str):
    file = tmp_path / "comparison.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UsageError, match=message) as error:
        read(file)
    assert "\n" not in str(error.value)
