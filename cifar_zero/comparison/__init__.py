"""The same run under several strategies: trained, read back, judged. The report of it is in reports/."""
