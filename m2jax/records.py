"""Records that engine, gateway, agents, pool and learner exchange (DESIGN §3).

Token ids, log-probabilities and versions are arrays from the engine to the loss: a
completion with a long context is copied only where it is stored and where it is
trained.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Ids that the gateway gives: of a completion, and of call i in its answer.
COMPLETION_PREFIX, CALL_PREFIX = 'chatcmpl-', 'call_'
_CALL_ID = re.compile(CALL_PREFIX + r'([0-9a-f]{32})_[0-9]+')


class ByValue:
  """Field-by-field equality for dataclasses with arrays.

  Fields with `compare=False` are excluded. The dataclass needs `eq=False`.
  """

  __hash__ = None  # type: ignore[assignment]  # as Python does for __eq__ alone

  def __eq__(self, other: object) -> bool:
    if type(other) is not type(self):
      return NotImplemented
    return all(
      np.array_equal(getattr(self, field.name), getattr(other, field.name))
      for field in dataclasses.fields(type(self))  # type: ignore[arg-type]
      if field.compare
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Completion(ByValue):
  """One (state, action) pair as recorded by the gateway: the unit of training.

  Attributes:
    id: unique id, also the `id` of the HTTP response.
    session: name of the gateway's session; one trajectory.
    turn: 0-based order in which the session's completions were recorded.
    parent: id of the completion whose recorded ids this prompt extends, else None.
    fork_reason: why the prompt does not extend a completion of the session.
    prompt_ids, response_ids: token ids as fed and as sampled, int32.
    logprobs, versions: per response token: sampling log-probability, float32; policy
      version, int32. These four accept any sequence and convert it to an array.
    finish_reason: 'stop', 'length' or 'cancelled'.
    status: the parser's verdict on the response (`text.chat.Message.status`).
    overrides: names of the sampling fields that the training session overrode.
    request: 0-based order in which the session's completions were requested, by a
      counter of the gateway.
    started_s, ended_s: seconds since the epoch, by a clock of the gateway's process
      that never steps.
    follows: id of the session's completion whose answer is the last one in the
      request's messages; the parent, if there is one. A fork can follow a completion
      too: the messages contain its answer, but the prompt could not extend its ids, for
      example because the template drops thinking.
    lineage: lineage of the weights in `versions` (`Lineages`); set by the pool.
    tool_s: seconds of the tool calls whose results the prompt adds, of parallel ones
      each, as the client measured them; 0 if it does not say.
    experts: [prompt + response tokens, L, top_k] int16, the expert ids that the engine
      used, -1 where it has none (`rollout.api.GenerateResult`); None: not recorded.
      Excluded from comparisons.
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
  request: int = 0
  started_s: float = 0.0
  ended_s: float = 0.0
  follows: str | None = None
  lineage: int = 0
  tool_s: float = 0.0
  experts: np.ndarray | None = dataclasses.field(
    default=None, compare=False, repr=False
  )

  def __post_init__(self):
    for field in ('prompt_ids', 'response_ids', 'versions'):
      object.__setattr__(self, field, np.asarray(getattr(self, field), np.int32))
    object.__setattr__(self, 'logprobs', np.asarray(self.logprobs, np.float32))

  @property
  def tokens(self) -> np.ndarray:
    """Prompt and response ids, int32: the prefix of a continuation."""
    return np.concatenate([self.prompt_ids, self.response_ids])


def completion_named(message: Mapping[str, Any]) -> str:
  """Id of the completion that the ids of an assistant message's calls name, or ''.

  Args:
    message: an OpenAI dict, of which nothing is checked.
  """
  calls = message.get('tool_calls')
  for call in calls if isinstance(calls, (list, tuple)) else ():
    name = call.get('id') if isinstance(call, Mapping) else None
    match = _CALL_ID.fullmatch(name) if isinstance(name, str) else None
    if match:
      return COMPLETION_PREFIX + match[1]
  return ''


def check_verdict(task: str, success: float) -> None:
  """Raises ValueError with the task's name unless a verdict is in [0, 1]."""
  if not (isinstance(success, numbers.Real) and 0 <= success <= 1):  # nan is not
    raise ValueError(
      f'task {task}: the verdict is {success!r}: must be a number in [0, 1]'
    )


@dataclasses.dataclass(frozen=True)
class WorkItem:
  """One rollout group in submission order; everything needed to reissue it.

  Attributes:
    index: position in the stream: windowed FIFO's index and the data position.
    task: the task's spec string (`tasks` rebuilds the task from it).
    group_size: trajectories sampled for it.
    attempt: 0, then +1 for every reissue after a restart.
    taken_before: number of items taken before its submission, except those that a
      restart rolled back; its age is counted from there.
  """

  index: int
  task: str
  group_size: int
  attempt: int = 0
  taken_before: int = 0

  @property
  def session_prefix(self) -> str:
    """Prefix of the sessions of this attempt, up to a dash."""
    return f'rl-{self.index}-{self.attempt}'


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """How one episode ended. Its completions are in the pool under `session`.

  Attributes:
    session: name of the episode's session at the gateway.
    item: index of its work item, or -1 outside training (evaluation).
    rank: 0 … group_size − 1 within the item.
    task, family: the task's spec string and family name.
    end_reason: 'answer', 'max_turns', 'length' or 'context', of a scaffold 'loop' or
      'rules', or of a command 'timeout', 'exit' or 'limit', which are judged; or
      'infrastructure', which is masked from loss and baseline (law 5).
    error: for 'infrastructure', what failed; for the ends of a command, the details;
      for an answer, what its verifier printed.
    success: the verifier's verdict in [0, 1].
    wall_s: wall-clock seconds of the episode, including tools.
    tool_calls: number of calls executed.
    tool_errors: number of calls that did not parse, named an unknown tool or had wrong
      arguments.
    answer: the final assistant text.
    messages: the whole chat as OpenAI dicts, for the report; results of the white-box
      agent's calls also have their `duration_s`.
    rewards: what environment or agent paid for single turns, by completion id; without
      an entry 0. Empty: turns are not paid.

  Raises:
    ValueError: `success` or a reward is no such number; names the task.
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
  rewards: Mapping[str, float] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    check_verdict(self.task, self.success)
    for id_, reward in self.rewards.items():
      if not (isinstance(reward, numbers.Real) and math.isfinite(reward)):
        raise ValueError(
          f'task {self.task}: the reward of {id_} is {reward!r}: must be a finite '
          'number'
        )

  @property
  def parallel_calls(self) -> tuple[int, int]:
    """Number of calls in turns with several of them, and of all; by the messages."""
    replies = [m for m in self.messages if m.get('role') == 'assistant']
    by_turn = [len(m.get('tool_calls') or ()) for m in replies]
    return sum(n for n in by_turn if n > 1), sum(by_turn)

  @property
  def domain(self) -> str:
    """The family's part before '/' (`tasks.mixed`); '' in a run of one domain."""
    domain, slash, _ = self.family.partition('/')
    return domain if slash else ''


@dataclasses.dataclass(frozen=True)
class TrajectoryReward:
  """The reward of a trajectory, for the report.

  Attributes:
    process, speed, perf: sums over its turns, before α and β, undiscounted; `perf` is
      the success and what single turns were paid.
    total: G_0, the discounted return.
  """

  process: float
  speed: float
  perf: float
  total: float


_LINEAGE_STEPS = 2**20  # more updates than a lineage has


def policy_version(lineage: int, step: int) -> int:
  """(lineage, step) as one number: higher for later weights of a run. Fits int32."""
  return lineage * _LINEAGE_STEPS + step


def split_versions(versions: np.ndarray) -> tuple[int, np.ndarray]:
  """Lineage and steps of numbers of `policy_version`; the lineage of none is 0.

  Raises:
    ValueError: they are of several lineages.
  """
  versions = np.asarray(versions, np.int64)
  lineages = (versions + 1) // _LINEAGE_STEPS  # the first step is -1
  if len(found := np.unique(lineages)) > 1:
    raise ValueError(f'versions of the lineages {found.tolist()} in one completion')
  lineage = int(found[0]) if found.size else 0
  return lineage, (versions - lineage * _LINEAGE_STEPS).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Lineages:
  """The tree of all weights of a run: a version is (lineage, step) (law 5).

  Every start of the learner begins a lineage at the step that it restored. The updates
  of the previous lineage after that step are lost, but completions sampled by its
  weights may still be trained on.

  Attributes:
    branches: (parent lineage, first step) of each lineage; the first one is the root
      and has parent -1.
  """

  branches: tuple[tuple[int, int], ...] = ((-1, 0),)

  @property
  def current(self) -> int:
    """The lineage of the current weights."""
    return len(self.branches) - 1

  def updates_between(
    self, lineage: int, versions: Sequence[int], present: int
  ) -> np.ndarray:
    """Number of updates between weights and the current ones: [len(versions)] int64.

    Counts the updates of both since their last common ancestor: present - version for
    an ancestor of the current weights, plus the lost updates for other weights.

    Args:
      lineage, versions: the weights.
      present: step of the current weights, in the lineage `current`.
    """
    of = np.asarray(versions, np.int64)
    mine, theirs = self._path(self.current, present), self._path(lineage, None)
    shared = next(i for i in theirs if i in mine)
    common = np.full(of.shape, mine[shared])
    limit = theirs[shared]
    common = np.minimum(common, of if limit is None else limit)
    return present - common + np.maximum(of - common, 0)

  def _path(self, lineage: int, last: int | None) -> dict[int, int | None]:
    """Last step of each lineage on the path to the root, starting at `lineage`."""
    path = {}
    while lineage >= 0:
      path[lineage] = last
      lineage, last = self.branches[lineage]
    return path
