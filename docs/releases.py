"""Draws releases.png, one square for each release and strategy of benchmarks/results/audited_releases.json, into the
current folder: `python docs/releases.py`."""

import json
from pathlib import Path

from matplotlib import pyplot
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle
from packaging.version import Version

COLORS = {"passes": "#4caf50", "different": "#d32f2f", "not judged": "#f2c94c", "cannot run": "#bdbdbd"}
LABELS = {
    "passes": "correct",
    "different": "wrong, without a message",
    "not judged": "not judged",
    "cannot run": "does not run",
}

file = Path(__file__).parents[1] / "benchmarks/results/audited_releases.json"
(tested,) = json.loads(file.read_text()).values()
releases = sorted(tested, key=Version)
strategies = list(tested[releases[-1]]["strategies"])
kinds = list(COLORS)
squares = [[kinds.index(tested[each]["strategies"][name][0]) for each in releases] for name in strategies]

figure, axes = pyplot.subplots(figsize=(14, 3.6))
axes.pcolormesh(
    squares, cmap=ListedColormap(list(COLORS.values())), vmin=0, vmax=len(kinds), edgecolor="w", linewidth=3
)
axes.invert_yaxis()
axes.set_aspect("equal")
axes.set_xticks([index + 0.5 for index in range(len(releases))], releases, rotation=45, ha="right")
names = [name.replace("deepspeed_stage_", "ZeRO ").replace("_", " ") for name in strategies]
axes.set_yticks([index + 0.5 for index in range(len(names))], names)
axes.tick_params(length=0)
for spine in axes.spines.values():
    spine.set_visible(False)
patches = [Rectangle((0, 0), 1, 1, color=COLORS[kind], label=LABELS[kind]) for kind in kinds]
figure.legend(handles=patches, loc="upper center", ncols=len(kinds), frameon=False)
figure.savefig("releases.png", bbox_inches="tight", dpi=100)
