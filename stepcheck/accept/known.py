"""Lists faults of DeepSpeed 0.19.8 and earlier releases. They do not make the acceptance fail."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepcheck.accept.cases import Case, stage_of


@dataclass(frozen=True)
class Known:
    """A fault that DeepSpeed 0.19.8 has."""

    shows: Callable[[Case], bool]  # in which cases
    finding: str  # regular expression that each finding matches
    what: str
    since: str = ""  # the release that began to have it, if that is known


KNOWN = (
    Known(
        lambda case: (
            case.strategy == "deepspeed_stage_0" and case.precision == "bfloat16" and "weight_decay" in case.options
        ),
        r"step 1: the weight .* is used with another value than the optimizer's",
        "the engine lets the optimizer step once before the training (DeepSpeed pull request 5104)",
        since="0.17.6",
    ),
    Known(
        lambda case: case.strategy == "deepspeed_stage_0" and case.precision == "float16",
        r"step \d: (the loss of micro-batch|all gradients|the gradient of|the norm of) .*",
        "ZeRO 0 divides the gradients by the loss scale, but does not multiply the loss by it (pull request 8393)",
        since="0.18.3",
    ),
    Known(
        lambda case: case.rests in ("first", "step 2") and (stage_of(case) == 3 or case.strategy.endswith("offload")),
        r"step \d: the gradient of branch\..*",
        "a layer without a gradient in the first micro-batch of a step gets its gradient of the previous step",
    ),
    Known(
        lambda case: (
            case.rests == "last" and case.strategy in ("deepspeed_stage_2_offload", "deepspeed_stage_3_offload")
        ),
        r"step \d: the gradient of branch\..*",
        "a layer without a gradient in the last micro-batch of a step loses its gradient",
    ),
    Known(
        lambda case: stage_of(case) == 3 and case.config.get("gradient_predivide_factor") == case.ranks,
        r"step \d: (all gradients together are|the gradient of .* is) .* times what autograd computed.*",
        "a gradient_predivide_factor that equals the number of ranks is not multiplied back",
    ),
)


def known_fault(case: Case, findings: Sequence[str], release: str) -> str:
    """Returns the known fault that explains all findings of a case under a release of DeepSpeed, or ""."""
    for known in KNOWN:
        is_fault_of_release = _numbers(release) >= _numbers(known.since) and known.shows(case)
        if findings and is_fault_of_release and all(re.fullmatch(known.finding, finding) for finding in findings):
            return known.what
    return ""


def _numbers(release: str) -> list[int]:
    """Returns the first three numbers of a release such as "0.18.3+local"."""
    return [int(number) for number in re.findall(r"\d+", release)[:3]]
