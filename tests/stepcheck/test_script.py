"""`stepcheck script`: each mistake that a migration makes is found and named, and a script without mistakes agrees."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("lightning", reason="needs Lightning")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision

from stepcheck.__main__ import main
from stepcheck.lightning.case import QUIET
from stepcheck.lightning.user_classes import build_parts
from stepcheck.replay.compare import Compared
from stepcheck.script.check import ScriptCheck, _converted, check_script
from stepcheck.script.command import record
from stepcheck.script.data import RecordedBatches, compare_batches
from stepcheck.script.explain import explain_loss
from stepcheck.script.recording import RecordedStep, Recording, match_names, settings
from stepcheck.usage import UsageError
from stepcheck.verdict import ENOUGH, Verdict
from tests.support.suite import ROOT, of_test_all

FOLDER = ROOT / "tests" / "users_code" / "scripts"
SCRIPT, MODULE = str(FOLDER / "old_train.py"), f"{FOLDER / 'migrated.py'}:Migrated"
WEIGHTS = 612

TOGETHER = (
    "step 1: weight_decay of model.body.0.bias is 0 in the module, and 0.1 in the script",
    "the script adds the gradient of the previous step, because a call of zero_grad is missing",
    "step 2: lr of model.body.0.weight is 0.009 in the module, and 0.01 in the script, because only the module has "
    "changed its rate before this step",
)
UNDIVIDED = ("either the script does not divide its loss by its 2", "or the module divides its loss")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Recording]:
    """Returns a function that returns the recording of the script with flags. The script runs once for equal flags."""
    return cache(lambda flags: record([SCRIPT, *flags.split()], 4, tmp_path_factory.mktemp("script")))


def verdict_of(
    recording: Recording, given: Mapping[str, str], module: str = MODULE, own_data: bool = False, max_steps: int = 0
) -> Verdict:
    """Returns the verdict on a module, trained in this process. `given` are its arguments."""
    options = {"module": module, **{f"module.{name}": value for name, value in given.items()}}
    return check_script(recording, build_parts(options, needs_data=False)[0], None, {}, own_data, max_steps)


@pytest.mark.parametrize(
    ("flags", "given"),
    [
        ("--amp --accumulate 2 --clip 0.3 --recompute", {"recompute": "true"}),
        ("--dropout 0.2 --resumed", {"dropout": "0.2"}),
    ],
)
def test_a_script_without_mistakes(flags: str, given: Mapping[str, str], recorded: Callable[[str], Recording]):
    verdict = verdict_of(recorded(flags), given, own_data=True)
    assert verdict.outcome == "agrees", str(verdict)
    assert (verdict.steps, verdict.identical, verdict.values) == (4, 4, 4 * WEIGHTS)
    assert {"batch", "options", "update"} <= verdict.shares.keys()
    assert verdict.not_judged == {}


def test_a_module_computes_with_the_threads_and_the_precision_of_the_script(recorded: Callable[[str], Recording]):
    module = build_parts({"module": MODULE}, needs_data=False)[0]
    seen: list[dict[str, Any]] = []
    before = settings()
    module.model.register_forward_pre_hook(lambda *_: seen.append(settings()))
    check_script(recorded("--tf32"), module)
    assert all({"threads": 2, "cuda.matmul.fp32_precision": "tf32"}.items() <= each.items() for each in seen)
    assert settings() == before


@pytest.mark.parametrize(
    ("flags", "given", "outcome", "texts"),
    [
        pytest.param(
            *("--sum", {}, "different", ["a sum over the samples in the script, a mean in the module"]),
            marks=of_test_all,
        ),
        pytest.param("--accumulate 2 --undivided", {}, "different", UNDIVIDED, marks=of_test_all),
        ("--accumulate 2", {"divided": "true"}, "different", UNDIVIDED),
        ("--no_zero_grad --by_epoch --decay_all", {}, "different", TOGETHER),
        pytest.param(
            *("--dropout 0.2", {}, "not judged", ["in step 1 the module draws other random numbers than the script"]),
            marks=of_test_all,
        ),
        ("--tf32", {"scale": "0.5"}, "different", ["0.5 times the script's plus 0, so the normalisation differs"]),
    ],
)
def test_mistakes_of_a_migration(
    flags: str,
    given: Mapping[str, str],
    outcome: str,
    texts: Sequence[str],
    recorded: Callable[[str], Recording],
):
    verdict = verdict_of(recorded(flags), given, own_data="scale" in given)
    assert verdict.outcome == outcome, str(verdict)
    found = "\n".join([str(verdict), *map(str, verdict.findings)])
    for text in texts:
        assert text in found
    assert ("update" in {finding.kind for finding in verdict.findings}) == ("--decay_all" in flags)


def test_no_step_may_be_left_out(tmp_path: Path):
    """The script draws other random numbers in one of eleven steps, for a loss that the module lacks."""
    verdict = verdict_of(record([SCRIPT, "--random_loss_in", "5"], 11, tmp_path), {})
    assert verdict.coverage > ENOUGH
    assert (verdict.outcome, verdict.findings) == ("not judged", [])
    assert "in step 5 the module draws other random numbers than the script" in str(verdict)


def test_all_likely_causes_of_a_factor_are_named():
    step = RecordedStep(0, None, batches=[torch.zeros(2)] * 2)
    assert explain_loss(torch.tensor(2.0), torch.tensor(1.0), step).count("; or ") == 1


@of_test_all
@pytest.mark.parametrize("library", ["accelerate", "transformers"])
def test_scripts_of_other_libraries(library: str, tmp_path: Path):
    """`make test-all` installs the libraries."""
    pytest.importorskip(library)
    file = FOLDER / f"with_{library}.py"
    verdict = verdict_of(record([str(file)], 4, tmp_path), {}, f"{file}:Migrated", max_steps=30)
    assert verdict.outcome == "agrees", str(verdict)


LOOP = """
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(torch.randn(16, 2), batch_size=4):
    model(x).sum().backward()
    {}
"""


@pytest.mark.parametrize(
    ("step", "message"),
    [
        pytest.param(
            "optimizer.step(); torch.optim.SGD(model.parameters()).step()", "several optimizers", marks=of_test_all
        ),
        pytest.param("optimizer.step(lambda: 0.0)", "without a closure", marks=of_test_all),
        pytest.param("clip_grad_norm_(model.parameters(), 1.0, float('inf'))", "by their inf-norm", marks=of_test_all),
        ("clip_grad_value_(model.parameters(), 1.0)", "clips each element of the gradients"),
        ("clip_grad_norm_(model.weight, 1.0); optimizer.step()", "clips parts of the gradients, or clips them twice"),
        ("pass", "without an optimizer step"),
        pytest.param("raise SystemExit(2)", "exit code 2", marks=of_test_all),
    ],
)
def test_scripts_that_cannot_be_recorded(step: str, message: str, tmp_path: Path):
    script = tmp_path / "old.py"
    script.write_text(LOOP.format(step))
    with pytest.raises(UsageError, match=message):
        record([str(script)], 4, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py --lr 1", MODULE], "missing.py is not a file"),
        (["'old.py", MODULE], "no closing quotation"),
        ([SCRIPT, "missing.py:M"], "missing.py does not exist"),
        ([SCRIPT, MODULE, "--lr", "1"], "--lr is not an option"),
        ([SCRIPT, MODULE, "--rename", "a"], "--rename: give OLD=NEW"),
        ([SCRIPT, MODULE, "--module.droput", "0"], "did you mean dropout?"),
        ([SCRIPT, MODULE, "--junit", "."], "--junit: . is a folder"),
    ],
)
def test_a_mistake_on_the_command_line_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["script", *arguments]) == 2
    assert message in capsys.readouterr().err


NEW = """
import torch
from lightning.pytorch import LightningModule


class M(LightningModule):
    def __init__(self, out: int):
        super().__init__()
        self.net = torch.nn.ModuleDict({"b": torch.nn.Linear(2, out), "a": torch.nn.Linear(2, 2)})
        self.net["norm"], self.net["drop"] = torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.5)

    def training_step(self, batch):
        x, mask = batch
        x = self.net["drop"](self.net["norm"](self.net["a"](x)))
        return self.net["b"](x * mask).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""

OLD = """
import torch
from torch import nn


class Masked(nn.Module):
    def forward(self, x, mask):
        return x * mask


class Data(torch.utils.data.Dataset):
    augment = nn.Dropout(0.1)

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return self.augment(torch.randn(2)), torch.ones(2)


torch.manual_seed(0)
layers = {"first": nn.Linear(2, 2), "norm": nn.BatchNorm1d(2), "drop": nn.Dropout(0.5)}
model = nn.ModuleDict({**layers, "masked": Masked(), "second": nn.Linear(2, 3)})
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=FUSED)
for x, mask in torch.utils.data.DataLoader(Data(), batch_size=4):
    optimizer.zero_grad()
    x = model["drop"](model["norm"](model["first"](x)))
    scaler.scale(model["second"](model["masked"](x, mask)).square().mean() / 8 * 8).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize("fused", [pytest.param("False", marks=of_test_all), "True"])
def test_the_command(fused: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The script calls `model` what the module calls `net`. Its first steps overflow, and are left out. Its data set
    augments with a module, and all batches have the same mask."""
    script, module, junit = (tmp_path / name for name in ("old.py", "new.py", "junit.xml"))
    module.write_text(NEW)
    script.write_text(OLD.replace("FUSED", fused))
    arguments = ["script", str(script), f"{module}:M", "--module.out", "3", "--junit", str(junit)]
    code = main([*arguments, "--rename", "first=net.a", "second=net.b", "norm=net.norm"])
    output = capsys.readouterr().out
    assert "5 steps audited, 3 skipped for overflow" in output
    assert "5 computed again by plain PyTorch, bit-identical" in output
    assert "buffers" not in output
    assert code == 0, output
    assert ElementTree.parse(junit).getroot().attrib["failures"] == "0"


class Small(LightningModule):
    """The model of SMALL. Its optimizer divides gradients by a loss scale itself."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0]).float().square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1, fused=True)


class OtherOptimizer(Small):
    """Makes the script's first update."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adamax(self.parameters(), lr=0.1)


class NeedsFloat32(Small):
    """Has another rounding error than the script."""

    def scores(self, x: Tensor) -> Tensor:
        """Returns the script's scores of `x`."""
        scores = self.model(x) / 7 * 7
        if scores.dtype == torch.float64:
            raise TypeError("needs float32")
        return scores

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.scores(batch[0]).square().mean()


class CallsItself(NeedsFloat32):
    """Has an attribute with a function, of which a deep copy of the module has no copy."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = lambda x: self.model(x) / 7 * 7


class Ends(Small):
    """Ends its training after three steps."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.should_stop = self.global_step == 3


class Doubled(Small):
    """Has gradients of twice the script's size, which underflow without a loss scale."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 1e-9 * super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        for weight in self.parameters():
            assert weight.grad is not None
            weight.grad *= 2


SMALL = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, enabled={float16})
for (x,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 2)), batch_size=2):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16, enabled={float16}):
        loss = model(x).float().square().mean()
    scaler.scale(1e-9 * loss if {float16} else loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Recording]:
    """Returns a function that returns the recording of SMALL, with or without float16."""

    def record_small(float16: bool) -> Recording:
        folder = tmp_path_factory.mktemp("small")
        (folder / "old.py").write_text(SMALL.format(float16=float16))
        return record([str(folder / "old.py")], 8, folder)

    return cache(record_small)


def train_in_float16(recording: Recording, module: Any, init_scale: float) -> Verdict:
    """Returns the verdict on a module in float16, which Lightning by itself would not use on the CPU."""
    check = ScriptCheck(recording, {})
    module.train_dataloader = lambda: RecordedBatches(recording)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=1000)
    plugins = MixedPrecision("16-mixed", "cpu", scaler)
    Trainer(accelerator="cpu", max_steps=8, plugins=plugins, callbacks=[check], **QUIET).fit(module)
    return check.verdict


def test_a_fused_optimizer_repeats_updates_without_the_loss_scale(small: Callable[[bool], Recording]):
    """The loss scale overflows in the first steps."""
    verdict = train_in_float16(small(False), Small(), 2.0**18)
    assert 0 < verdict.steps < 8
    assert not verdict.findings, str(verdict)
    assert "update" in verdict.shares


def test_gradients_that_underflow_without_a_loss_scale_are_judged(small: Callable[[bool], Recording]):
    verdict = train_in_float16(small(True), Doubled(), 2.0**24)
    assert verdict.outcome == "different", str(verdict)
    assert "the module's gradient is 2 times the script's" in str(verdict)


def test_a_module_that_ends_its_training_before_the_script_differs(small: Callable[[bool], Recording]):
    verdict = check_script(small(False), Ends())
    assert [str(each) for each in verdict.findings] == ["step 3: the module ends its training after this step"]


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (CallsItself, "scores has a function that calls the trained module"),
        (OtherOptimizer, "updates, because Adamax cannot use the state of the script's Adam"),
        (NeedsFloat32, " a copy of the module fails (TypeError: needs float32)"),
    ],
)
def test_a_step_that_cannot_be_judged(module: type[LightningModule], why: str, small: Callable[[bool], Recording]):
    verdict = check_script(small(False), module())
    assert (verdict.outcome, verdict.findings) == ("not judged", []), str(verdict)
    assert why in str(verdict)


def test_an_error_without_a_finite_tolerance_is_no_fault():
    assert [Compared("replayed gradient", "a", math.inf, each, 1).share for each in (math.inf, math.nan)] == [0, 0]


@pytest.mark.parametrize(("value", "own"), [(9, torch.tensor(1.0)), (torch.tensor(9.0), 1)])
def test_step_counts_are_integers_in_some_optimizers_and_tensors_in_others(value: Any, own: Any):
    converted = _converted(value, own)
    assert (converted, type(converted)) == (9, type(own))


def test_batches_of_skipped_steps_are_not_recorded_and_not_judged(tmp_path: Path):
    verdict = Verdict()
    compare_batches(Recording(tmp_path, skipped=1, steps=1), [], verdict)
    assert verdict.not_judged == {"batches": "the script skipped steps that overflowed"}


@pytest.mark.parametrize(
    ("script", "module", "renames", "expected"),
    [
        ({"fc.weight": 2, "fc.bias": 3}, {"net.fc.bias": 3, "net.fc.weight": 2}, {}, ["net.fc.weight", "net.fc.bias"]),
        (
            {"0.weight": 2, "1.weight": 2},
            {"b.weight": 2, "a.weight": 2},
            {"0": "a", "1": "b"},
            ["a.weight", "b.weight"],
        ),
        ({"0.weight": 2, "1.weight": 3}, {"a": 2, "b": 3}, {}, ["a", "b"]),
        ({"fc.weight": 2}, {"fc.weight": 3}, {}, r"the script's model has fc.weight \(2,\), but .* fc.weight \(3,\)"),
        ({"a": 2, "b": 2}, {"a": 2}, {}, r"has b \(2,\), but the module has no other tensor"),
    ],
)
def test_weights_are_matched(
    script: Mapping[str, int], module: Mapping[str, int], renames: Mapping[str, str], expected: list[str] | str
):
    tensors = [{name: torch.zeros(size) for name, size in each.items()} for each in (script, module)]
    if isinstance(expected, str):
        with pytest.raises(UsageError, match=expected):
            match_names(tensors[0], tensors[1], renames)
    else:
        assert [*match_names(tensors[0], tensors[1], renames).values()] == expected
