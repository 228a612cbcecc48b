"""Tests what benchmarks/releases.py keeps of an acceptance, and the page that docs/releases.py makes of it."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from benchmarks.releases import shortened
from tests.support.helpers import ROOT, needs_browser, shown_by_browser

CASES = (
    ("deepspeed_stage_2", "float32", {"shares": {"gradient": 0.25, "loss": 0.0}, "summary": "0.25 of a tolerance"}),
    ("deepspeed_stage_2", "bfloat16", {"shares": {"gradient": 30.0}, "findings": ["a"], "summary": "<b>step</b> 1"}),
    ("deepspeed_stage_3", "float32", {"steps": 0, "passed": False, "shares": {}, "summary": "rank 0 failed"}),
)
"""A correct case, one with a fault that all releases have, and one that does not run."""


@needs_browser
def test_the_page_of_a_release_shows_each_case_and_its_first_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    blank = {"steps": 4, "passed": True, "findings": []}
    engines = [{"strategy": strategy, "row": row, **blank, **case} for strategy, row, case in CASES]
    result = {"date": "2026-11-28", "machine": {"cores": "2"}, **shortened({"passed": False, "engines": engines})}
    (tmp_path / "results.json").write_text(json.dumps({"0.18.1": result}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["releases.py", "results.json"])
    runpy.run_path(str(ROOT / "docs" / "releases.py"), run_name="__main__")
    shown = shown_by_browser((tmp_path / "releases.html").as_uri(), tmp_path / "browser")
    green, grey, red = "#4caf50", "#bdbdbd", "#d32f2f"
    cells = re.findall(r'<td style="background: (.*?)">(.*?)</td>', shown)
    assert cells == [(green, "0.25"), (red, "30"), (grey, ""), ("", "")]
    faults = re.findall(r"<li>(.*?)</li>", shown)
    assert faults == ["ZeRO 2, bfloat16: &lt;b&gt;step&lt;/b&gt; 1", "ZeRO 3, float32: rank 0 failed"]
    assert (tmp_path / "releases.png").exists()
