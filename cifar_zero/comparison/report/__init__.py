"""The report of a comparison: report.html and its plots."""
