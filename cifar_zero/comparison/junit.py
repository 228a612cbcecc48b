"""Writes the verdicts as JUnit XML for CI systems (format: https://github.com/testmoapp/junitxml); no torch."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from cifar_zero.comparison.result import Comparison
from cifar_zero.comparison.tables import verdict_line

NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 forbids, such as the control characters of colours in a log."""


def write(comparison: Comparison, file: Path) -> None:
    """Writes one test suite with a test case per variant; a variant that did not train or agree is a failure."""
    failures = sum(not variant.passed for variant in comparison.variants)
    counts = {"tests": str(len(comparison.variants)), "failures": str(failures), "errors": "0"}
    about = {"name": comparison.title, "timestamp": comparison.created.removesuffix("Z")}
    root = ET.Element("testsuites")
    suite = ET.SubElement(root, "testsuite", about | counts)
    for variant in comparison.variants:
        seconds = sum(run.metrics.get("perf/fit_seconds") or 0.0 for run in variant.runs)
        case = ET.SubElement(suite, "testcase", classname="compare", name=variant.name, time=f"{seconds:.3f}")
        line = verdict_line(variant)
        if variant.passed:
            ET.SubElement(case, "system-out").text = line
        else:
            causes = variant.verdict.causes if variant.verdict is not None else []
            ET.SubElement(case, "failure", message=line).text = "\n".join([line, *causes, f"again: {variant.command}"])
    ET.indent(root)
    text = ET.tostring(root, encoding="utf-8", xml_declaration=True).decode()
    file.write_text(NOT_IN_XML.sub("", text), encoding="utf-8")
