"""Errors that stop a run of Forge."""


class RolloutsFailed(RuntimeError):
  """The engine, gateway or sandbox has failed permanently; the message gives why."""
