"""Diagnosis of runs: `doctor` finds what went wrong in one, and proposes a change."""
