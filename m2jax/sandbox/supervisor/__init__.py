"""Runs as a script, not as part of the package: see `__main__.py`."""
