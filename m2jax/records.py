"""Records of engine, gateway, agents, pool and learner (DESIGN §3): plain data.

Token ids, log-probabilities and versions are arrays from the engine to the loss: a
completion of a long context is copied where it is stored and where it is trained, and
nowhere between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


class ByValue:
  """Equality for dataclasses with arrays: by value, field by field.

  Fields with `compare=False` are left out. The dataclass needs `eq=False`.
  """

  __hash__ = None

  def __eq__(self, other: object) -> bool:
    if type(other) is not type(self):
      return NotImplemented
    return all(
      np.array_equal(getattr(self, field.name), getattr(other, field.name))
      for field in dataclasses.fields(self)
      if field.compare
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Completion(ByValue):
  """One (state, action) pair as the gateway saw it: the unit of training.

  Attributes:
    id: unique id, also the `id` of the HTTP response.
    session: the API key that asked; one trajectory.
    turn: 0-based order of the completion within its session.
    parent: id of the completion whose recorded ids this prompt extends, else None.
    fork_reason: why a session with earlier completions did not extend one of them.
    prompt_ids, response_ids: token ids as fed and as sampled, int32.
    logprobs, versions: per response token: sampling log-probability, float32; policy
      version, int32. Any sequence will do for these four; it becomes an array.
    finish_reason: 'stop', 'length' or 'cancelled'.
    status: the parser's verdict on the response (`text.chat.Message.status`).
    overrides: names of sampling fields the training session overrode.
    started_s, ended_s: wall-clock seconds since the epoch.
    follows: id of the session's completion whose answer is the last that the request's
      messages show; the parent, if there is one. A fork follows too where the client's
      text shows the answer but the prompt could not extend its ids, as when the
      template drops thinking.
    lineage: of the weights that `versions` count (`Lineages`); the pool sets it.
    experts: [prompt + response tokens, L, top_k] int16, the expert ids that the engine
      used, -1 where it has none (`rollout.api.GenerateResult`); None: not recorded. Two
      completions are compared without it.
  """

  id: str
  session: str
  turn: int
  parent: str | None
  fork_reason: str | None
  prompt_ids: np.ndarray
  response_ids: np.ndarray
  logprobs: np.ndarray
  versions: np.ndarray
  finish_reason: str
  status: str
  overrides: tuple[str, ...] = ()
  started_s: float = 0.0
  ended_s: float = 0.0
  follows: str | None = None
  lineage: int = 0
  experts: np.ndarray | None = dataclasses.field(
    default=None, compare=False, repr=False
  )

  def __post_init__(self):
    for field in ('prompt_ids', 'response_ids', 'versions'):
      object.__setattr__(self, field, np.asarray(getattr(self, field), np.int32))
    object.__setattr__(self, 'logprobs', np.asarray(self.logprobs, np.float32))

  @property
  def tokens(self) -> np.ndarray:
    """Prompt and response ids, int32: what a continuation of it begins with."""
    return np.concatenate([self.prompt_ids, self.response_ids])


@dataclasses.dataclass(frozen=True)
class WorkItem:
  """One rollout group in submission order; everything needed to reissue it.

  Attributes:
    index: position in the stream: windowed FIFO's index and the data position.
    task: the task's spec string (`tasks` rebuilds the task from it).
    group_size: trajectories sampled for it.
    attempt: 0, then +1 for every reissue after a restart.
    taken_before: items taken before its submission, those that a restart undid left
      out; what its age is counted from.
  """

  index: int
  task: str
  group_size: int
  attempt: int = 0
  taken_before: int = 0


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """How one episode ended. Its completions are in the pool under `session`.

  Attributes:
    session: the gateway session (API key) of the episode.
    item: index of its work item, or -1 outside training (evaluation).
    rank: 0 … group_size − 1 within the item.
    task, family: the task's spec string and family name.
    end_reason: 'answer', 'max_turns', 'length' or 'context', which are judged; or
      'infrastructure', which is masked from loss and baseline (law 5).
    error: for 'infrastructure', what broke.
    success: the verifier's verdict in [0, 1].
    wall_s: wall-clock seconds of the episode, tools included.
    tool_calls: commands run; tool_errors: calls that did not parse or named no tool.
    answer: the final assistant text.
    messages: the whole chat as OpenAI dicts, for people to read.
  """

  session: str
  item: int
  rank: int
  task: str
  family: str
  end_reason: str
  success: float
  wall_s: float
  tool_calls: int
  tool_errors: int = 0
  error: str = ''
  answer: str = ''
  messages: tuple[dict, ...] = ()


@dataclasses.dataclass(frozen=True)
class TrajectoryReward:
  """What a trajectory earned: one row of the report.

  Attributes:
    process, speed, perf: sums over its turns, before α and β, undiscounted.
    total: G_0, the discounted return.
  """

  process: float
  speed: float
  perf: float
  total: float


@dataclasses.dataclass(frozen=True)
class Lineages:
  """The tree of all weights that a run has had: a version is (lineage, step) (law 5).

  Every start of the learner begins a lineage at the step it restored. What the earlier
  lineage did after that step is lost, yet completions that its weights sampled may
  still be trained on.

  Attributes:
    branches: (parent lineage, step at which it began) of each lineage; the first is the
      root and has the parent -1.
  """

  branches: tuple[tuple[int, int], ...] = ((-1, 0),)

  @property
  def current(self) -> int:
    """The lineage of the present weights."""
    return len(self.branches) - 1

  def updates_between(
    self, lineage: int, versions: Sequence[int], present: int
  ) -> np.ndarray:
    """Updates that separate weights from the present ones: [len(versions)] int64.

    The updates since their last common weights, of both: for weights that the present
    ones descend from present - version, for others also what they did themselves
    before they were lost.

    Args:
      lineage, versions: the weights.
      present: step of the present weights, of the lineage `current`.
    """
    versions = np.asarray(versions, np.int64)
    mine, theirs = self._path(self.current, present), self._path(lineage, None)
    shared = next(i for i in theirs if i in mine)
    common = np.full(versions.shape, mine[shared])
    limit = theirs[shared]
    common = np.minimum(common, versions if limit is None else limit)
    return present - common + np.maximum(versions - common, 0)

  def _path(self, lineage: int, last: int | None) -> dict[int, int | None]:
    """The last step of each lineage on the way to the root, from the youngest on."""
    path = {}
    while lineage >= 0:
      path[lineage] = last
      lineage, last = self.branches[lineage]
    return path
