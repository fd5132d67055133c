"""Errors that stop a run of Forge."""


class RolloutsFailed(RuntimeError):
  """The engine, gateway or sandbox has failed permanently; the message gives why."""

  repeatable = True  # no error of the user: a scheduler may start the job again


class ProcessLost(RolloutsFailed):
  """Another process of the engine has ended: JAX cannot end this one cleanly."""
