"""Reads which parts of a package import one another."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx

from tests.support.helpers import ROOT


def import_graph(package: str) -> networkx.DiGraph:
    """Returns the imports between the folders and files directly in a package, also those inside of functions, by
    `import_module`, and of objects that a string names as MODULE:NAME."""
    files = {_module(file): file for file in (ROOT / package).rglob("*.py") if "upstream" not in file.parts}
    graph = networkx.DiGraph()
    for name, file in files.items():
        for imported in {*_imported(file)} & files.keys() - {package}:
            ends = [each.split(".")[1] for each in (name, imported) if each != package]
            if len({*ends}) == 2:
                graph.add_edge(*ends)
    return graph


def _module(file: Path) -> str:
    return file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")


def _imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.split(":")[0]
