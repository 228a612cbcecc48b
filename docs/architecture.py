"""Draws the packages of cifar_zero and their imports into docs/architecture.md: python docs/architecture.py."""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "cifar_zero"
PAGE = Path(__file__).with_suffix(".md")


def package_imports() -> dict[str, set[str]]:
    """Returns the other packages of cifar_zero that each of them imports."""
    imports: dict[str, set[str]] = {init.parent.name: set() for init in PACKAGE.glob("*/__init__.py")}
    for name, others in imports.items():
        for file in (PACKAGE / name).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "cifar_zero":
                    inner = str(node.module).split(".")[1:2]
                    others |= set(inner or [alias.name for alias in node.names])
        others.discard(name)
    return imports


def reachable(imports: dict[str, set[str]], name: str) -> set[str]:
    """Returns the packages that a package imports directly or through others."""
    return imports[name].union(*(reachable(imports, other) for other in imports[name]))


def diagram() -> str:
    """Returns the Mermaid diagram; an arrow that follows from two others is left out."""
    imports = package_imports()
    lines = ["flowchart TD"]
    for name in sorted(imports):
        implied = set().union(*(reachable(imports, other) for other in imports[name]))
        lines += [f"    {name} --> {other}" for other in sorted(imports[name] - implied)]
    return "```mermaid\n" + "\n".join(lines) + "\n```"


if __name__ == "__main__":
    PAGE.write_text(re.sub(r"```mermaid\n.*?```", diagram(), PAGE.read_text(), flags=re.DOTALL))
