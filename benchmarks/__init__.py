"""One file per claim; each prints a table, or JSON with `--json`."""
