"""Proves, while any training runs, that each distributed step computes what plain PyTorch computes."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepcheck.auditor import audit
    from stepcheck.engines import NotAuditable
    from stepcheck.replay import Replay
    from stepcheck.start import Start
    from stepcheck.verdict import Finding, StepCheckError, Verdict

__all__ = ["Finding", "NotAuditable", "Replay", "Start", "StepCheckError", "Verdict", "audit"]

_HOMES = {"audit": "auditor", "NotAuditable": "engines", "Replay": "replay", "Start": "start"}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is used, so that the command starts without importing torch."""
    if name not in __all__:
        raise AttributeError(f"module 'stepcheck' has no attribute {name!r}")
    return getattr(importlib.import_module(f"stepcheck.{_HOMES.get(name, 'verdict')}"), name)
