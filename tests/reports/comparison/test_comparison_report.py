"""The report of made-up comparisons: what is on the page, and that nothing it lacks breaks it."""

from __future__ import annotations

import io
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from comparison.result import Comparison, Curve, Difference, ModelStates, Run, Spread, Variant, Verdict, VerdictKind
from reports.comparison import write
from reports.comparison.bars import memory_figure, speed_figure
from reports.comparison.classes import class_figure
from reports.comparison.curves import POINTS, accuracy_figure, loss_figure
from reports.comparison.look import PALETTE, theme
from reports.comparison.text import difference_line, headline, number, size, spread, verdict_name

STEPS = 30
NASTY = '<script src="http://host/x.js">|`*&$\\x$'
"""A name that is markup to HTML, to Markdown and to matplotlib."""


def trained(
    name: str, kind: VerdictKind = "bit-identical", seeds: int = 1, off: float = 0.0, classes: int = 3
) -> Variant:
    """A variant whose losses are `off` the reference's from step 8 on."""
    steps = list(range(1, STEPS + 1))
    runs = [
        Run(
            folder=f"runs/{name}/{seed}",
            seed=seed,
            metrics={
                "test/acc_per_class": {f"class {label}": 0.5 + off for label in range(classes)},
                "mem/peak_rank_bytes": [3_000_000, 4_000_000],
                "mem/model_state_rank_bytes": [700, 1400],
                "mem/parameter_rank_bytes": [100, 200],
                "mem/gradient_rank_bytes": [200, 400],
                "mem/optimizer_rank_bytes": [400, 800],
            },
            losses=Curve(steps, [2.0 - 0.01 * step + seed + off * (step >= 8) for step in steps]),
            curves={"val/acc": Curve([10, 20, 30], [0.1, 0.2, 0.3], [1.0, 2.0, 3.0])},
            effective={"compute_dtype": "torch.float32", "reduce_bucket_size": 50_000_000},
        )
        for seed in range(seeds)
    ]
    return Variant(
        name,
        strategy=name,
        world_size=2,
        accumulate=1,
        command=f"python train.py --name '{name}'",
        runs=runs,
        figures={"perf/images_per_second": Spread(4321.0, 4000.0, 4600.0), "test/acc": Spread(0.5, 0.5, 0.5)},
        predicted=ModelStates(200, 400, 700),
        verdict=Verdict(kind, off, 1e-6, off, 1e-6, 8 if off else None, 8 if kind == "different" else None),
    )


def comparison(*others: Variant, **fields) -> Comparison:
    reference = trained("baseline", "reference", seeds=len(others[0].runs) if others else 1)
    known = {"command": "python compare.py", "created": "2026-01-02T03:04:05+00:00", "reference": "baseline"}
    common = {"title": "net", "machine": {"torch": "2.15.0"}, "recipe": {"model": "net"}, **known}
    return Comparison(**{**common, **fields}, variants=[reference, *others])


def failed(name: str) -> Variant:
    command = f"python train.py --name {name}"
    return Variant(name, name, 2, 1, command, error="error: <no> GPU", verdict=Verdict("not trained"))


class Page(HTMLParser):
    """What a browser would ask for, and what it would show."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.asked_for: list[str] = []
        self.shown: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.asked_for += [value or "" for name, value in attrs if name in ("src", "srcset", "href", "data", "poster")]

    def handle_data(self, data: str) -> None:
        self.shown.append(data)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The files of a report with a bit of everything."""
    differing = Difference(NASTY, {"baseline": "1", NASTY: "2"})
    whole = comparison(trained(NASTY), failed("fsdp"), differences=[differing], title=NASTY, notes=["Bounds & all."])
    return write(whole, tmp_path_factory.mktemp("report"))


def test_the_page_asks_for_nothing_and_shows_names_as_they_are(written: list[Path]):
    names = ["report.html", "report.md", "losses.png", "accuracy.png", "classes.png", "speed.png", "memory.png"]
    assert [file.name for file in written] == names
    assert all(file.stat().st_size for file in written)
    text = written[0].read_text()
    page = Page(text)
    assert len(page.asked_for) == 2 * 5  # each figure, light and dark
    assert all(address.startswith("data:image/png;base64,") for address in page.asked_for)
    assert not {"script", "link", "iframe", "object", "base"} & set(page.tags)
    assert "url(" not in text
    assert "@import" not in text
    assert NASTY in page.shown
    assert any("<no> GPU" in part for part in page.shown)
    assert "Bounds & all." in page.shown


def test_the_page_in_markdown(written: list[Path]):
    text = written[1].read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    (row,) = (line for line in rows if "script" in line and "bit-identical" in line)
    header = next(line for line in rows if "verdict" in line)
    assert row.replace("\\|", "").count("|") == header.count("|")
    assert row.startswith('| \\<script src="http://host/x.js"\\>\\|\\`\\*&\\$\\\\x\\$ |')
    assert "\n\nBounds & all.\n" in text
    assert "- **fsdp**: error: \\<no\\> GPU" in text
    for picture in ("losses", "accuracy", "classes", "speed", "memory"):
        assert f"({picture}.png)" in text


def test_what_is_not_known_is_left_out(tmp_path: Path):
    bare = Variant("ddp", "ddp", 2, 1, "", runs=[Run("runs/ddp", 0, {}, Curve([], []), {})])
    nothing = Comparison("net", "", "", {}, {}, "baseline", [failed("baseline"), bare])
    assert [file.name for file in write(nothing, tmp_path)] == ["report.html", "report.md"]
    shown = Page((tmp_path / "report.html").read_text()).shown
    assert "baseline did not train; ddp was not judged; 0 of 2 strategies trained and agree." in shown
    assert {"Loss", "Speed", "Memory"}.isdisjoint(shown)


def test_losses_that_are_no_numbers_are_drawn_as_far_as_they_go():
    diverged = trained("ddp", "different", off=1.0)
    diverged.runs[0].losses.values[10:] = [float("inf"), float("nan")] * 10
    figure = loss_figure(comparison(diverged))
    assert figure is not None
    assert count(pixels(figure), PALETTE[0]) > 0
    assert figure.axes[0].get_ylim()[1] < 4


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        ([("ddp", "bit-identical"), ("fsdp2", "within rounding")],
         "3 of 3 strategies trained and agree: 1 bit-identical, 1 within rounding"),
        ([("ddp", "different"), ("fsdp2", "bit-identical")],
         "ddp parts from baseline at step 8; 2 of 3 strategies trained and agree"),
        ([("ddp", "not trained"), ("fsdp2", "not trained")],
         "ddp and fsdp2 did not train; 1 of 3 strategies trained and agree"),
        ([], "1 of 1 strategies trained and agree"),
    ],
)  # fmt: skip
def test_headline(others: list[tuple[str, VerdictKind]], sentence: str):
    assert headline(comparison(*(trained(name, kind) for name, kind in others))) == sentence


def test_a_difference_names_whose_value_it_is():
    assert difference_line(Difference("epochs", {"a": "1", "b": "2", "c": "1"})) == "1 (a, c); 2 (b)"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.012345, "0.0123"), (1.0, "1.00"), (43.21, "43.2"), (4329.4, "4,329"), (0.0, "0"), (-1.5, "-1.50")],
)
def test_figures_have_three_digits(value: float, text: str):
    assert number(value) == text


def test_sizes_and_spreads():
    assert [size(count) for count in (999, 1000, 2_500_000, 123_456_789_000)] == [
        "999 B",
        "1.00 kB",
        "2.50 MB",
        "123 GB",
    ]
    assert spread(Spread(2.0, 1.0, 4.0)) == "2.00 (1.00 to 4.00)"
    assert spread(Spread(2.0, 2.0, 2.0)) == "2.00"
    assert spread(None) == "-"


def pixels(figure: Figure) -> np.ndarray:
    """(height, width, 3) of a figure as it is drawn."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=100)
    return np.asarray(Image.open(drawn).convert("RGB"))


def count(image: np.ndarray, color: str) -> int:
    """Pixels of exactly this colour."""
    return int((image == np.round(255 * np.array(to_rgb(color)))).all(axis=-1).sum())


def test_equal_curves_are_all_seen():
    with theme(dark=False):
        figure = loss_figure(comparison(trained("ddp"), trained("fsdp2")))
        assert figure is not None
        assert len(figure.axes) == 1  # no difference to draw
        figure.legends[0].remove()
        image = pixels(figure)
    assert min(count(image, color) for color in PALETTE[:2]) > 100


def test_the_second_panel_has_the_largest_difference_of_the_seeds_and_gaps_where_there_is_none():
    other = trained("ddp", "different", seeds=2, off=0.25)
    other.runs[1].losses.values[-1] += 1.0
    figure = loss_figure(comparison(other, trained("fsdp2", seeds=2), rounding=Curve([1, STEPS], [1e-6, 1e-5])))
    assert figure is not None
    above, below = figure.axes
    (line,) = (line for line in below.lines if len(np.asarray(line.get_xdata())) == STEPS)
    y = np.asarray(line.get_ydata(), dtype=float)
    assert np.isnan(y[:7]).all()
    assert np.allclose(y[7:-1], 0.25)
    assert np.isclose(y[-1], 1.25)
    assert below.get_yscale() == "log"
    assert [text.get_text() for text in below.texts] == ["ddp parts at step 8"]
    mean = np.asarray(above.lines[0].get_ydata(), dtype=float)
    assert np.allclose(mean, [2.5 - 0.01 * step for step in range(1, STEPS + 1)])


def test_of_many_steps_a_point_is_the_mean_of_several():
    variant = trained("baseline", "reference")
    variant.runs[0].losses = Curve(list(range(1, 10 * POINTS + 1)), [float(step) for step in range(1, 10 * POINTS + 1)])
    figure = loss_figure(Comparison("", "", "", {}, {}, "baseline", [variant]))
    assert figure is not None
    line = figure.axes[0].lines[0]
    assert np.array_equal(np.asarray(line.get_xdata()), np.arange(POINTS) * 10 + 5.5)
    assert np.array_equal(np.asarray(line.get_ydata()), np.arange(POINTS) * 10 + 5.5)


def test_accuracy_by_time_needs_times():
    timeless = comparison(trained("ddp"))
    for variant in timeless.variants:
        variant.runs[0].curves["val/acc"].seconds = []
    by_step, both = accuracy_figure(timeless), accuracy_figure(comparison(trained("ddp"), target_accuracy=0.25))
    assert by_step is not None
    assert both is not None
    assert (len(by_step.axes), len(both.axes)) == (1, 2)


def test_the_memory_is_that_of_the_fullest_rank_beside_the_prediction():
    figure = memory_figure(comparison(trained("ddp"), failed("fsdp")))
    assert figure is not None
    states, peak = figure.axes
    widths = [patch.get_width() for patch in states.patches]  # pyright: ignore[reportAttributeAccessIssue]
    assert np.allclose(widths[:6], [0.2, 0.4, 0.8, 0.2, 0.4, 0.7])
    assert [text.get_text() for text in states.texts] == ["1.40 kB", "1.30 kB"] * 2 + ["-"]
    assert [text.get_text() for text in peak.texts] == ["4.00 MB", "4.00 MB", "-"]


def test_speed_has_a_panel_for_what_is_known():
    figure = speed_figure(comparison(trained("ddp"), failed("fsdp"), target_accuracy=0.5))
    assert figure is not None
    (axes,) = (axes for axes in figure.axes if axes.axison)
    assert [text.get_text() for text in axes.texts] == ["4,321", "4,321", "-"]


@pytest.mark.parametrize(("classes", "others", "text"), [(10, 1, "50.0"), (100, 11, "50")])
def test_every_class_has_a_cell_for_each_variant(classes: int, others: int, text: str):
    variants = [trained(f"variant {place}", classes=classes) for place in range(others)]
    result = comparison(*variants)
    result.variants[0] = trained("baseline", "reference", classes=classes)
    figure = class_figure(result)
    assert figure is not None
    cells = [cell.get_text() for axes in figure.axes for cell in axes.texts]
    assert cells == [text] * classes * (1 + others)
    names = [label.get_text() for axes in figure.axes for label in axes.get_yticklabels()]
    assert names == [f"class {label}" for label in range(classes)]


def test_classes_are_not_compared_with_a_reference_that_was_not_tested():
    untested = comparison(trained("ddp"))
    untested.variants[0].runs[0].metrics.pop("test/acc_per_class")
    figure = class_figure(untested)
    assert figure is not None
    assert figure.get_supxlabel() == "accuracy in the test (%); baseline was not tested"


def test_the_mean_is_over_the_seeds_that_have_the_step():
    variant = trained("baseline", "reference", seeds=2)
    variant.runs[1].losses = Curve([1, 2], [9.0, 9.0])
    figure = loss_figure(Comparison("", "", "", {}, {}, "baseline", [variant]))
    assert figure is not None
    line = np.asarray(figure.axes[0].lines[0].get_ydata(), dtype=float)
    assert np.isclose(line[1], (1.98 + 9.0) / 2)
    assert np.isclose(line[-1], variant.runs[0].losses.values[-1])


def test_what_was_not_judged_says_why():
    late = trained("ddp")
    late.verdict, late.unjudged = None, "no optimizer step that the reference has too"
    short = Variant("fsdp2", "fsdp2", 2, 1, "", verdict=Verdict("different", remark="ran 3 steps, the reference 5"))
    assert verdict_name(late) == "not judged: no optimizer step that the reference has too"
    assert verdict_name(short) == "≠ different (ran 3 steps, the reference 5)"


def test_a_class_that_one_variant_lacks_has_no_number():
    figure = class_figure(comparison(trained("ddp", classes=2)))
    assert figure is not None
    assert [cell.get_text() for cell in figure.axes[0].texts] == ["50.0", "50.0", "50.0", "50.0", "50.0", "-"]


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_shows_the_figures_of_a_dark_page(written: list[Path], tmp_path: Path):
    shot = tmp_path / "shot.png"
    quiet = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-sync"]
    command = [str(CHROMIUM), "--headless", "--no-sandbox", *quiet, "--disable-component-update"]
    command += ["--blink-settings=preferredColorScheme=0", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--window-size=1200,4000", f"--screenshot={shot}", written[0].as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    image = np.asarray(Image.open(shot).convert("RGB"))
    assert count(image, PALETTE[0]) > 1000  # bars
    assert count(image, "#ffffff") == 0
    assert tuple(image[-1, 0]) == (0x16, 0x19, 0x1D)
