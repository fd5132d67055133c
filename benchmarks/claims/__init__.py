"""What Forge's choices are worth, where they can be distinguished in minutes.

  python -m benchmarks.claims --list
  python -m benchmarks.claims --claim=NAME --workdir=DIR --tune  # then commit
  python -m benchmarks.claims --claim=NAME --workdir=DIR

A claim (`rows`) compares arms under some conditions, on a token task (`tasks`) with the
project's own engine, scheduler, learner and queue (`training`). So that the result is
not a choice of the one who measures:

- Every arm tunes its learning rate on the same grid, with the same number of trials, on
  seeds of their own (`TUNING_SEEDS`). `--tune` writes the rates and all settings to
  `setups/NAME.json`; five seeds are measured only with a set-up that is committed.
- All arms of a seed start from the same weights, see the same instances and have the
  same number of episodes. Their CPU time is in the table.
- Differences are paired by seed. The verdict is about the rival with the highest mean,
  by an interval that is corrected for the number of rivals (`verdicts`). An equality is
  a result, and so is "undecided", with the number of seeds that would decide.

A row starts no measurement after two hours of its measurements' time; the same command
resumes from DIR.
"""
