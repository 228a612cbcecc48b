"""Tests cifar-zero plan, started as a user starts it, and the page of its --html in a browser."""

import json
import re
from pathlib import Path

import pytest

from cifar_zero.core.console import command
from cifar_zero.planning import page
from tests.support.helpers import ROOT, assert_ok, needs_browser, run_program, shown_by_browser


def test_thirteen_billion_parameters_take_little_memory():
    """The peak memory of the process is 0.84 GB, mostly used by torch. The weights alone would take 52 GB."""
    flags = ["--model", "vit_13b", "--devices", "8", "--device_memory", "80GB", "--optimizer", "adamw", "--json"]
    code = "import pathlib, sys; from cifar_zero.planning.plan import main; main()\n"
    # On Linux, ru_maxrss would be the value of pytest, from which the process was forked.
    code += "print(pathlib.Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0], file=sys.stderr)"
    done = run_program("-c", code, *flags)
    assert_ok(done)
    said = json.loads(done.stdout)
    assert said["parameters"] == 12_900_853_770
    assert said["recommended"] == "deepspeed_stage_3"
    assert said["command"].endswith("--strategy deepspeed_stage_3")
    assert "--devices 8" in said["command"]
    assert int(done.stderr.split()[-1]) * 1024 < 2e9


def test_the_table_of_strategies(run_command):
    code, out, _ = run_command(
        "plan", "--model", "vit_tiny", "--devices", "2", "--device_memory", "80GB", "--batch_size", "64"
    )
    assert code == 0
    assert (
        "vit_tiny, 5,362,378 parameters (5,362,378 trained), sgd, 32-true, micro-batches of 32 on each of 2 ranks"
        in out
    )
    assert out.endswith(
        "baseline needs 0.38 of the 72.00 GB available to a rank\n"
        f"{command('train')} --model vit_tiny --devices 2 --batch_size 64 --strategy baseline\n"
    )
    assert len([line for line in out.splitlines() if " yes " in line]) == 11


@pytest.mark.parametrize("flags", [(), ("--device_memory", "8GB")])
def test_a_printed_command_trains_on_the_planned_ranks(flags: tuple[str, ...], run_command):
    """On a CPU, --devices auto of the command could be another number."""
    _, out, _ = run_command("plan", "--accelerator", "cpu", "--model", "net_moe", "--model.ep_size", "2", *flags)
    assert out.splitlines()[-1].endswith("--devices 2"), out


@pytest.mark.parametrize("model", ["Indexed", "Counted"])
def test_a_model_that_uses_its_blocks_in_its_own_way_is_planned(model: str, run_command):
    code, out, err = run_command(
        "plan", "--model", f"{ROOT}/tests/users_code/own_code.py:{model}", "--device_memory", "8GB"
    )
    assert (code, err) == (0, "")
    assert "recommended" in out


POINTS = (
    ("vit_tiny", 2, "32-true", 64, ""),
    ("vit_small", 8, "bf16-mixed", 16, "_offload"),
)
"""Model, devices, precision, images per rank, and the end of the names of ZeRO's strategies."""

SENT = {"ddp": 2, "deepspeed_stage_1": 3, "deepspeed_stage_2": 3, "deepspeed_stage_3": 2}
"""Numbers sent per trained parameter and step (docs/cluster.md). ZeRO 3 sends one of its two for frozen parameters
too."""

COMMON = ["--optimizer", "adamw", "--ema", "0.9", "--activation_offload", "true"]
COMMON += ["--lora.rank", "4", "--lora.target", "blocks.*.attention.qkv"]


@needs_browser
def test_the_page_shows_the_numbers_of_the_plan(run_command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(page, "MODELS", ("vit_tiny", "vit_small"))
    monkeypatch.setattr(page, "DEVICES", (1, 2, 8))
    file = tmp_path / "plan.html"
    assert run_command("plan", *COMMON, "--html", str(file))[0] == 0
    for model, devices, precision, images, end in POINTS:
        flags = f"--model {model} --devices {devices} --precision {precision} --batch_size {devices * images} --json"
        said = json.loads(run_command("plan", *flags.split(), *COMMON, "--device_memory", "1TB")[1])
        estimates = {each["strategy"]: each for each in said["strategies"]}
        sliders = f"model={model}&devices={devices}&precision={precision}&batch={images}&offload={int(bool(end))}"
        shown = shown_by_browser(f"{file.as_uri()}#{sliders}", tmp_path)
        rows = re.findall(r'<div id="(\w+)" data-device="(\S+)" data-host="(\S+)" data-sent="(\S+)">', shown)
        assert [row[0] for row in rows] == ["ddp", *(f"deepspeed_stage_{stage}{end}" for stage in (1, 2, 3))]
        for name, device, host, sent in rows:
            size = 2 if precision == "bf16-mixed" and name != "ddp" else 4
            numbers = SENT[name.removesuffix("_offload")] * said["trained_parameters"]
            if name.startswith("deepspeed_stage_3"):
                numbers += said["parameters"] - said["trained_parameters"]
            assert float(device) == pytest.approx(estimates[name]["device"], rel=1e-3), name
            assert float(host) == estimates[name]["host"], name
            assert float(sent) == pytest.approx(numbers * size * (1 - 1 / devices)), name


def test_refused_options_leave_the_page_as_it_was(run_command, tmp_path: Path):
    new, earlier = tmp_path / "new.html", tmp_path / "plan.html"
    earlier.write_text("earlier")
    for file in (new, earlier):
        code, _, said = run_command("plan", "--tensor_parallel_size", "2", "--html", str(file))
        assert (code, "cannot be planned" in said) == (2, True)
    assert [*tmp_path.iterdir()] == [earlier]
    assert earlier.read_text() == "earlier"


@pytest.mark.parametrize("path", ["", "file/plan.html", "device"])
def test_a_page_that_cannot_be_written_is_refused_first(path: str, run_command, tmp_path: Path):
    (tmp_path / "file").touch()
    (tmp_path / "device").symlink_to("/dev/null")
    *_, last = run_command("plan", "--html", str(tmp_path / path))[2].splitlines()
    assert re.fullmatch("error: --html: .* give (a|another) file", last)
