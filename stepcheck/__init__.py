"""Proves, while any training runs, that each distributed step computes what plain PyTorch computes."""

from stepcheck.audit import Audit, audit
from stepcheck.engines import NotAuditable
from stepcheck.verdict import Finding, StepCheckError, Verdict

__all__ = ["Audit", "Finding", "NotAuditable", "StepCheckError", "Verdict", "audit"]
