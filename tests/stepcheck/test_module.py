"""Tests `stepcheck module` on users' LightningModules: real commands, real ranks."""

import importlib.util
import json
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("lightning", reason="needs Lightning")

from stepcheck.__main__ import main, parse
from stepcheck.launch.launcher import train_cases
from stepcheck.lightning.case import ModuleCase
from stepcheck.lightning.module import cases_of, parse_cases, train
from stepcheck.lightning.user_classes import build_parts
from stepcheck.testing import assert_agrees
from stepcheck.usage import UsageError
from stepcheck.verdict import Verdict
from tests.support.suite import HANG_SECONDS, of_test_all, run_python
from tests.users_code.own_code import Alone, StreamData
from tests.users_code.own_modules import MODULES

MODULE = """
import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Healthy(lightning.LightningModule):
    def __init__(self, lr: float = 0.01, optimizers: int = 1, manual: bool = False, fails: bool = False):
        super().__init__()
        if fails:
            raise ValueError("no good")
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 4))
        self.lr, self.optimizers, self.automatic_optimization = lr, optimizers, not manual

    def training_step(self, batch):
        inputs, labels = batch
        return nn.functional.cross_entropy(self.net(inputs), labels)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        if self.optimizers > 1:
            return [optimizer] * self.optimizers
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self):
        inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(inputs, inputs.argmax(dim=1) % 4), batch_size=4, shuffle=True)

class WrongUnderDDP(Healthy):
    def training_step(self, batch):
        loss = super().training_step(batch)
        is_trained = self.trainer.lightning_module is self  # not the plain copy
        return 1.01 * loss if is_trained and type(self.trainer.strategy).__name__ == "DDPStrategy" else loss

class ForgetsMomentum(Healthy):
    def on_train_start(self):
        optimizer = self.trainer.optimizers[0]
        for state in getattr(optimizer, "optimizer", optimizer).state.values():
            state["momentum_buffer"].zero_()

class Counts(Healthy):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def on_after_backward(self):
        self.count += 1 + self.global_rank

class CopiedOnOneRank(Healthy):
    def __init__(self):
        super().__init__()
        self.log_file = open(os.devnull) if os.environ["RANK"] == "0" else None

class SetUpOnceOnOneRank(Healthy):
    calls = 0

    def setup(self, stage):
        SetUpOnceOnOneRank.calls += 1
        if SetUpOnceOnOneRank.calls > 1 and os.environ["RANK"] == "0":
            raise ValueError("was set up before")

class NeedsVocab(lightning.LightningModule):
    def __init__(self, vocab, width=4):
        super().__init__()

class Child(NeedsVocab):
    def __init__(self, depth=2, **options):
        super().__init__(**options)

NET, NUMBER = nn.Module, 3
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the path of the user's file."""
    file = tmp_path_factory.mktemp("users") / "own.py"
    file.write_text(MODULE)
    return str(file)


def classes(file: str, name: str = "Healthy", **options: str) -> dict[str, str]:
    return {"module": f"{file}:{name}", **{f"module.{key}": value for key, value in options.items()}}


@pytest.mark.distributed
def test_a_module_that_is_wrong_under_one_strategy(file: str, tmp_path: Path):
    junit, out = tmp_path / "junit.xml", tmp_path / "out.json"
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 2, "reduce_bucket_size": 40}}))
    command = ["module", f"{file}:WrongUnderDDP", "--module.lr", "0.02", "--accumulate", "2", "--steps", "6"]
    command += ["--strategies", "ddp", "deepspeed_stage_3_offload", str(tmp_path / "zero.json")]
    command += ["--junit", str(junit), "--json", str(out)]
    done = run_python("-m", "stepcheck", *command, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 1, done.stderr
    results = json.loads(out.read_text())["engines"]
    assert [each["outcome"] for each in results] == ["different", "agrees", "agrees"], done.stdout
    assert all(each["steps"] == 6 and each["replayed"] == 4 for each in results)
    assert "different   ddp, accumulate 2: step 1: " in done.stdout
    assert "2 of 3 agree with plain PyTorch" in done.stdout
    (failure,) = ElementTree.parse(junit).getroot().iter("failure")
    alone = shlex.join(results[0]["command"])
    assert alone in str(failure.text)
    assert alone in done.stdout


RESUMED = {
    ("Healthy", "ddp", 12): "",
    ("Healthy", "zero.json", 12): "",
    ("Healthy", "deepspeed_stage_3", 12): "",
    ("Counts", "ddp", 12): "",
    ("Healthy", "ddp", 5): "step 6: [0] of the batch in the first resumed step differs from the run that",
    ("ForgetsMomentum", "ddp", 12): "step 13: ['momentum_buffer'] of optimizer tensor 0 (net.0.weight)",
    ("ForgetsMomentum", "deepspeed_stage_3", 12): "step 13: ['momentum_buffer'] of optimizer tensor 0 (net.0.weight, ",
}
"""The beginning of the first finding, by module, strategy and the step after which the run is resumed. An epoch of two
ranks has 12 batches. Lightning's loader starts it again if it was saved within one."""

CONFIGS = {"zero.json": {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}}

UNCOPIED = {
    "CopiedOnOneRank": "not judged: replays, because the module cannot be copied (TypeError",
    "SetUpOnceOnOneRank": "not judged: replays, because building a copy of the module fails (ValueError",
}
"""Modules that rank 0 alone cannot replay, and the beginning of the summary."""

REFUSED: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "--module uses manual optimization": ({"manual": "true"}, {}),
    "--module has several optimizers": ({"optimizers": "2"}, {}),
    "--module: own.py, line 13: ValueError: no good": ({"fails": "true"}, {}),
    '--module: Parser key "module.lr"': ({"lr": "much"}, {}),
    "--accumulate 5 does not divide the 12 batches of an epoch": ({}, {"accumulate": 5}),
    "--trainer: Trainer.__init__() got an unexpected keyword argument 'max_epoch'": ({}, {"trainer": {"max_epoch": 3}}),
    "--trainer: lightning.pytorch.trainer.trainer.Trainer() got multiple": ({}, {"trainer": {"precision": 16}}),
}
"""The arguments of the module and other fields of the case, by the beginning of the refusal."""


@pytest.fixture(scope="module")
def verdicts(file: str) -> list[dict[str, Any]]:
    """Trains the cases of RESUMED, UNCOPIED and REFUSED in one launch, and returns their verdicts."""
    cases = [
        ModuleCase(classes(file, name), strategy, CONFIGS.get(strategy, {}), 2, steps=16, resume_at=step)
        for name, strategy, step in RESUMED
    ]
    cases += [ModuleCase(classes(file, name), ranks=2, steps=4) for name in UNCOPIED]
    cases += [ModuleCase(classes(file, **own), ranks=2, **fields) for own, fields in REFUSED.values()]
    return train_cases(
        cases,
        2,
        "stepcheck.lightning.train:train_case",
        lambda case, verdict: {"outcome": "refused", "summary": verdict.get("refused", ""), **verdict},
        HANG_SECONDS,
    )


@pytest.mark.distributed
def test_a_resumed_run_is_compared_with_the_run_that_continued(verdicts: list[dict[str, Any]]):
    for verdict, text in zip(verdicts, RESUMED.values(), strict=False):
        assert verdict["outcome"] == ("different" if text else "agrees"), verdict
        assert verdict["summary"].startswith(f"FAULT {text}" if text else "")


@pytest.mark.distributed
def test_no_rank_replays_a_module_that_one_rank_cannot_copy(verdicts: list[dict[str, Any]]):
    for verdict, text in zip(verdicts[len(RESUMED) :], UNCOPIED.values(), strict=False):
        assert (verdict["steps"], verdict["replayed"]) == (4, 0), verdict
        assert text in str(Verdict(not_judged=verdict["not_judged"]))


@pytest.mark.distributed
def test_what_only_the_ranks_can_tell_is_refused(verdicts: list[dict[str, Any]]):
    for verdict, text in zip(verdicts[-len(REFUSED) :], REFUSED, strict=True):
        assert verdict.get("refused", "").startswith(text), verdict


@of_test_all
@pytest.mark.distributed
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_modules_as_people_have_them(precision: str):
    names, cases = ["ddp", "deepspeed_stage_2", "deepspeed_stage_3"], []
    for each in MODULES:
        own = f"{each.__module__}:{each.__name__}"
        cases += cases_of({"module": own}, names, [1], {"precision": precision}, ranks=2, steps=6)
    failed = [(case, each["summary"]) for case, each in zip(cases, train(cases), strict=True) if not each["passed"]]
    assert not failed


def test_a_demo_of_lightning_in_a_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It fails if an earlier case is still in memory, or if the defaults contradict a file."""
    (tmp_path / "zero.json").write_text('{"gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}}')
    strategies = [str(tmp_path / "zero.json"), "deepspeed_stage_3_offload"]
    assert_agrees(Alone, StreamData, strategies=strategies, steps=4)
    assert capsys.readouterr().out.count("agrees") == 2


FILES = {
    "typo.json": '{"zero_optimization": {"stage": 2, "overlap_com": true}}',
    "optimizer.json": '{"optimizer": {"type": "Adam"}}',
    "scheduler.json": '{"scheduler": {"type": "WarmupLR"}}',
    "twice.json": '{"gradient_accumulation_steps": 2}',
    "half.json": '{"bf16": {"enabled": true}, "fp16": {"enabled": true}}',
    "negative.json": '{"gradient_clipping": -1}',
    "code.json": '{"torch_autocast": {"enabled": true}}',
    "broken.json": "{",
}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["nowhere.py:M"], "--module nowhere.py:M: nowhere.py does not exist"),
        (["own.py"], "--module own.py: give FILE.py:NAME"),
        (["own.py:Missing"], "--module own.py:Missing: own.py has no Missing"),
        (["no_package.training:M"], "there is no package or module 'no_package'"),
        (["own.py:Healthy", "--datamodule", "own.py:Nothing"], "--datamodule own.py:Nothing: own.py has no Nothing"),
        (["own.py:Healthy", "--module.lr"], "--module.lr has no value"),
        (["own.py:Healthy", "--model.lr", "1"], "--model.lr is not an option: did you mean --module.NAME?"),
        (["own.py:Healthy", "--strategies", "deepspeed_stage_4"], "did you mean deepspeed_stage_"),
        (["own.py:Healthy", "--steps", "3", "--resume_at", "3"], "--resume_at 3 must be from 1 to 2"),
        (["own.py:Healthy", "--gradient_clip_val", "-1"], "gradient_clip_val -1.0: it must be a number of at least 0"),
        (["own.py:Healthy", "--junit", "."], "--junit: . is a folder"),
        (["own.py:Healthy", "--strategies", "no.json"], "--strategies no.json cannot be read"),
        (
            ["own.py:Healthy", "--strategies", "typo.json"],
            "not read 'overlap_com': did you mean over",
        ),
        (["own.py:Healthy", "--strategies", "optimizer.json"], "optimizer: it would replace the module's configure_op"),
        (["own.py:Healthy", "--strategies", "scheduler.json"], "scheduler: it would replace the module's configure_op"),
        (["own.py:Healthy", "--strategies", "code.json"], "torch_autocast: use --precision bf16-mixed"),
        (["own.py:Healthy", "--strategies", "half.json"], "half.json: bf16 and fp16 are both enabled: switch one"),
        (["own.py:Healthy", "--strategies", "negative.json"], "gradient_clip_val -1: it must be a number"),
        (["own.py:Healthy", "--strategies", "broken.json"], "--strategies broken.json cannot be read: Exp"),
        (["own.py:Healthy", "--strategies", "twice.json", "--accumulate", "4"], "sets accumulate to 2, not 4"),
    ],
)
def test_a_mistake_is_one_line(
    flags: list[str],
    expected: str,
    file: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(Path(file).parent)
    for name, text in FILES.items():
        Path(name).write_text(text)
    assert main(["module", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


def test_without_lightning_the_command_names_the_packages(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lightning" else found(name))
    assert main(["module", f"{file}:Healthy"]) == 2
    assert "pip install lightning 'jsonargparse[signatures]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("NET", {}, "--module: Module is not a LightningModule: derive it from lightning.pytorch"),
        ("NUMBER", {}, "--module: 3 is not a LightningModule"),
        ("NeedsVocab", {}, "--module.vocab is required"),
        ("Child", {}, "--module.vocab is required"),
        ("NeedsVocab", {"vocb": "3"}, "--module.vocb is not an argument of"),
        ("NeedsVocab", {"vocab": "3"}, "--module has no train_dataloader"),
    ],
)
def test_a_class_that_cannot_be_trained_is_refused(name: str, options: dict[str, str], expected: str, file: str):
    with pytest.raises(UsageError, match=re.escape(expected)):
        build_parts(classes(file, name, **options))


def test_a_file_of_deepspeed_sets_the_maths(file: str, tmp_path: Path):
    zero = tmp_path / "zero.json"
    zero.write_text('{"gradient_accumulation_steps": 2, "train_batch_size": "auto", "zero_optimization": {"stage": 2}}')
    command = ["module", f"{file}:Healthy", "--module.optimizers", "1", "--precision", "bf16-mixed", "--devices", "2"]
    case, of_file = parse_cases(
        parse([*command, "--strategies", "ddp", str(zero), "--trainer.limit_train_batches", "6"])
    )
    assert (case.precision, case.accumulate, case.trainer) == ("bf16-mixed", 1, {"limit_train_batches": 6})
    assert (of_file.precision, of_file.accumulate) == ("bf16-mixed", 2)
    assert of_file.config == {"zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 2}}
    assert ModuleCase(**json.loads(json.dumps(asdict(of_file)))) == of_file
