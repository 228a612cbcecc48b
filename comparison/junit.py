"""The verdicts as JUnit XML, which CI systems read: a test case for each variant; no torch.

The format is the one of Jenkins' xUnit plugin (https://github.com/testmoapp/junitxml describes it).
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from comparison.result import GOOD, Comparison, Variant
from comparison.table import verdict_line

NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 has not: the control characters of a log's colours, for one."""


def write(comparison: Comparison, file: Path) -> None:
    """Writes one test suite; a variant that did not train or does not agree is a failure."""
    suite = ET.Element("testsuite", name=comparison.title, timestamp=comparison.created.removesuffix("Z"))
    failures = 0
    for variant in comparison.variants:
        seconds = sum(run.metrics.get("perf/fit_seconds") or 0.0 for run in variant.runs)
        case = ET.SubElement(suite, "testcase", classname="compare", name=variant.name, time=f"{seconds:.3f}")
        line = verdict_line(variant)
        if variant.verdict is None or variant.verdict.kind not in GOOD:
            failures += 1
            ET.SubElement(case, "failure", message=line).text = _details(variant)
        else:
            ET.SubElement(case, "system-out").text = line
    suite.set("tests", str(len(comparison.variants)))
    suite.set("failures", str(failures))
    suite.set("errors", "0")
    root = ET.Element("testsuites")
    root.append(suite)
    for element in root.iter():
        element.attrib = {name: _printable(value) for name, value in element.attrib.items()}
        element.text = element.text and _printable(element.text)
    ET.indent(root)
    ET.ElementTree(root).write(file, encoding="utf-8", xml_declaration=True)


def _details(variant: Variant) -> str:
    causes = variant.verdict.causes if variant.verdict is not None else []
    return "\n".join([verdict_line(variant), *causes, f"again: {variant.command}"])


def _printable(text: str) -> str:
    return NO_XML.sub("", text)
