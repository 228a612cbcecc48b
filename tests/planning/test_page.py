"""Tests the page of cifar-zero plan --html in a browser."""

import json
import re
from pathlib import Path

import pytest

from cifar_zero.core.errors import UsageError
from cifar_zero.planning import page, plan
from tests.support.helpers import needs_browser, shown_by_browser

POINTS = (
    ("vit_tiny", 2, "32-true", 64, ""),
    ("vit_tiny", 8, "bf16-mixed", 32, ""),
    ("vit_small", 8, "bf16-mixed", 16, "_offload"),
)
"""Model, devices, precision, images per rank, and the end of the names of ZeRO's strategies."""

SENT = {"ddp": 2, "deepspeed_stage_1": 3, "deepspeed_stage_2": 3, "deepspeed_stage_3": 2}
"""Numbers sent per trained parameter and step (docs/cluster.md). ZeRO 3 sends one of its two for frozen parameters
too."""

COMMON = ["--optimizer", "adamw", "--ema", "0.9", "--activation_offload", "true"]
COMMON += ["--lora.rank", "4", "--lora.target", "blocks.*.attention.qkv"]


@needs_browser
def test_the_page_shows_the_numbers_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(page, "MODELS", ("vit_tiny", "vit_small"))
    monkeypatch.setattr(page, "DEVICES", (1, 2, 8))
    file = tmp_path / "plan.html"
    monkeypatch.setattr("sys.argv", ["plan", *COMMON, "--html", str(file)])
    assert plan.main() == 0
    for model, devices, precision, images, end in POINTS:
        flags = f"--model {model} --devices {devices} --precision {precision} --batch_size {devices * images} --json"
        monkeypatch.setattr("sys.argv", ["plan", *flags.split(), *COMMON, "--device_memory", "1TB"])
        capsys.readouterr()
        plan.main()
        planned = json.loads(capsys.readouterr().out)
        estimates = {each["strategy"]: each for each in planned["strategies"]}
        sliders = f"model={model}&devices={devices}&precision={precision}&batch={images}&offload={int(bool(end))}"
        shown = shown_by_browser(f"{file.as_uri()}#{sliders}", tmp_path)
        rows = re.findall(r'<div id="(\w+)" data-device="(\S+)" data-host="(\S+)" data-sent="(\S+)">', shown)
        assert [row[0] for row in rows] == ["ddp", *(f"deepspeed_stage_{stage}{end}" for stage in (1, 2, 3))]
        for name, device, host, sent in rows:
            size = 2 if precision == "bf16-mixed" and name != "ddp" else 4
            numbers = SENT[name.removesuffix("_offload")] * planned["trained_parameters"]
            if name.startswith("deepspeed_stage_3"):
                numbers += planned["parameters"] - planned["trained_parameters"]
            bytes_sent = numbers * size * (1 - 1 / devices)
            assert float(device) == pytest.approx(estimates[name]["device"], rel=1e-3), name
            assert float(host) == estimates[name]["host"], name
            assert float(sent) == pytest.approx(bytes_sent), name


def test_refused_options_leave_the_page_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    new, earlier = tmp_path / "new.html", tmp_path / "plan.html"
    earlier.write_text("earlier")
    for file in (new, earlier):
        monkeypatch.setattr("sys.argv", ["plan", "--tensor_parallel_size", "2", "--html", str(file)])
        with pytest.raises(UsageError, match="cannot be planned"):
            plan.main()
    assert [*tmp_path.iterdir()] == [earlier]
    assert earlier.read_text() == "earlier"


@pytest.mark.parametrize("path", ["", "file/plan.html", "device"])
def test_a_page_that_cannot_be_written_is_refused_first(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    (tmp_path / "device").symlink_to("/dev/null")
    monkeypatch.setattr("sys.argv", ["plan", "--html", str(tmp_path / path)])
    with pytest.raises(UsageError, match=r"^--html: .* give (a|another) file$"):
        plan.main()
