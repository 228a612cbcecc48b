"""The options of a run by the names that its flags have; plain Python."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from config import Config


def flat(config: Config) -> dict[str, Any]:
    """Every option and its value: optimizer.lr, data.root, seed; model is the network's name."""
    found: dict[str, Any] = {}
    for key, value in asdict(config).items():
        if isinstance(value, dict) and {*value} == {"name", "options"}:
            found[key] = value["name"]
            value = value["options"]
        found |= _flat(key, value)
    return found


def _flat(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {key: value}
    found: dict[str, Any] = {}
    for inner, under in value.items():
        found |= _flat(f"{key}.{inner}", under)
    return found
