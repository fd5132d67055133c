"""Errors that stop a run of Forge."""


class RolloutsFailed(RuntimeError):
  """The engine, gateway or sandbox has failed permanently; the message gives why."""

  repeatable = True  # no error of the user: a scheduler may start the job again


class ProcessLost(RolloutsFailed):
  """Another process of the engine has ended: JAX cannot end this one cleanly."""


class Stopped(RuntimeError):
  """Another process of the job has stopped, which ends this one too.

  Attributes:
    repeatable: whether the same command may succeed: not where that process reported an
      error of the user.
  """

  def __init__(self, reason: str, repeatable: bool = True):
    super().__init__(reason)
    self.repeatable = repeatable
