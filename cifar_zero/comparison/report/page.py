"""Writes report.html, which needs no other file, and its plots as PNG files."""

import base64
from pathlib import Path

from jinja2 import StrictUndefined, Template

from cifar_zero.comparison import tables
from cifar_zero.comparison.report.curves import accuracy_plot, loss_plot, style
from cifar_zero.comparison.result import Comparison

DPI = 150
"""Resolution of the plots, which are 1,500 pixels wide for high-density screens."""

TEMPLATE = Path(__file__).with_name("report.html.j2")


def write_page(comparison: Comparison, folder: Path) -> None:
    """Writes the report of a comparison into an existing folder; sections without content are left out."""
    with style():
        drawn = {"losses.png": loss_plot(comparison), "accuracy.png": accuracy_plot(comparison)}
        plots: dict[str, str] = {}
        for name, figure in drawn.items():
            if figure is not None:
                figure.savefig(folder / name, dpi=DPI)
                plots[name] = base64.b64encode((folder / name).read_bytes()).decode()
    sections = (
        ("Loss", "losses.png", None),
        ("Accuracy", "accuracy.png", tables.figures(comparison, tables.ACCURACY)),
        ("Speed", "", tables.figures(comparison, tables.SPEED)),
        ("Memory of the fullest rank", "", tables.figures(comparison, tables.MEMORY)),
        ("Settings in effect", "", tables.settings(comparison)),
    )
    template = Template(
        TEMPLATE.read_text(), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = template.render(
        comparison=comparison,
        headline=tables.headline(comparison),
        verdict_line=tables.verdict_line,
        sections=sections,
        plots=plots,
    )
    (folder / "report.html").write_text(page, encoding="utf-8")
