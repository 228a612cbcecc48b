"""What every part uses: errors and exit codes, the console, atomic file writes, hardware, start-up time; no torch."""
