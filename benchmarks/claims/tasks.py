"""Token tasks without text: forks in one response, and paid turns.

Both are about symbols 1 … 8. Where a symbol x is asked for, the habit is to copy it,
and the right token is x + 8; supervised fine-tuning on demonstrations that take the
right one with a given probability makes that habit. The policy has to change a choice
that it already makes sometimes, as in the RL of a trained agent, and how often it makes
it at the start is a setting.

  Forks    BEGIN x_1 … x_n ASK → [free tokens] y_1 … y_n END, in one response
  Modes    the same, after a token that chooses how long the episode takes
  Domains  the same, after a token of the domain, on which the right tokens depend
  Turns    BEGIN x_1 → y_1, x_2 → y_2, …: the environment shows the next symbol after
           each response of one token, and pays for each right one
  Sums     the same, with the sum of what was shown so far: the last one is paid, and
           earlier responses may be missing in prompts

An environment step is a few comparisons of integers, so the time of a run is that of
engine and learner. Agents, gateway and chat template take no part: the prompt of each
turn extends the recorded ids of the turn before, but in `Sums` without them.

Axes: n symbols of an episode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from m2jax.checks import require
from m2jax.records import Completion, Trajectory
from m2jax.rl import rewards

SYMBOLS = 8
BEGIN, ASK, END, FREE = 0, 2 * SYMBOLS + 1, 2 * SYMBOLS + 2, 2 * SYMBOLS + 3
DOMAIN = FREE + SYMBOLS  # FREE … FREE + 7 are the free tokens
VOCABULARY, MOST_DOMAINS = 32, 4


class Response(NamedTuple):
  """One response, as an engine returns it or as a demonstration."""

  tokens: np.ndarray
  logprobs: np.ndarray
  versions: np.ndarray
  finish_reason: str = 'stop'
  experts: np.ndarray | None = None

  @classmethod
  def written(cls, tokens: np.ndarray) -> Response:
    """A demonstration; expert iteration uses no log-probabilities of it."""
    zeros = np.zeros(len(tokens))
    return cls(tokens, zeros, zeros.astype(np.int32))


class Verdict(NamedTuple):
  """The judgement of an episode.

  Attributes:
    success: the reward at its end.
    paid: the reward of each turn; empty if turns are not paid.
    right: what evaluations count: 1 iff all places are right, or the share of turns.
    wall_s: the time that it takes in the task's units.
  """

  success: float
  paid: tuple[float, ...]
  right: float
  wall_s: float = 0.0


class Task(Protocol):
  """A token task; an instance is the array of an episode's symbols."""

  @property
  def turns(self) -> int:
    """Responses of an episode."""
    ...

  @property
  def demonstrated(self) -> Task:
    """A task with the same demonstrations, equal for tasks that differ in reward."""
    ...

  @property
  def max_tokens(self) -> int:
    """Maximum tokens of a response."""
    ...

  @property
  def context_tokens(self) -> int:
    """Maximum tokens of an episode."""
    ...

  def instance(self, rng: np.random.Generator) -> np.ndarray: ...

  def domain(self, symbols: np.ndarray) -> str:
    """The instance's domain; '' if the task has one only."""
    ...

  def prompt(self, symbols: np.ndarray, responses: Sequence[np.ndarray]) -> np.ndarray:
    """The prompt after these responses."""
    ...

  def demonstration(
    self, symbols: np.ndarray, rng: np.random.Generator
  ) -> list[np.ndarray]:
    """The responses of a demonstrated episode."""
    ...

  def judge(self, symbols: np.ndarray, responses: Sequence[np.ndarray]) -> Verdict: ...


def _choices(
  symbols: np.ndarray,
  right: np.ndarray,
  habits: Sequence[float] | np.ndarray,
  rng: np.random.Generator,
) -> np.ndarray:
  """The right token with probability habits[i], else the copy."""
  chosen = rng.random(len(symbols)) < np.asarray(habits)[: len(symbols)]
  return np.where(chosen, right, symbols)


@dataclasses.dataclass(frozen=True)
class Forks:
  """Places in one response at which the right token is not the usual one.

  Attributes:
    habits: probability of the right token in demonstrations, by place.
    free: tokens before them, any of eight, that have no effect on the verdict.
    graded: the verdict is the share of right places; else 1 iff all are right.
    shortest: places of the shortest instance, drawn uniformly up to len(habits); None:
      all instances have all places.
  """

  habits: tuple[float, ...] = (0.1, 0.5, 0.7)
  free: int = 0
  graded: bool = False
  shortest: int | None = None

  turns = 1

  def __post_init__(self):
    require(self, self.habits, 'habits', 'at least one probability')
    require(self, all(0 <= q <= 1 for q in self.habits), 'habits', 'in [0, 1]')
    require(self, self.free >= 0, 'free', 'at least 0')
    fits = self.shortest is None or 1 <= self.shortest <= len(self.habits)
    require(self, fits, 'shortest', f'in [1, {len(self.habits)}], or None')

  @property
  def demonstrated(self) -> Forks:
    return dataclasses.replace(self, graded=False)

  @property
  def max_tokens(self) -> int:
    return self.free + len(self.habits) + 2  # one too long is wrong, and seen

  @property
  def context_tokens(self) -> int:
    return 2 + len(self.habits) + self.max_tokens

  def instance(self, rng: np.random.Generator) -> np.ndarray:
    places = len(self.habits)
    if self.shortest is not None:
      places = int(rng.integers(self.shortest, places + 1))
    return rng.integers(1, SYMBOLS + 1, places)

  def domain(self, symbols: np.ndarray) -> str:
    del symbols
    return ''

  def prompt(self, symbols: np.ndarray, responses: Sequence[np.ndarray]) -> np.ndarray:
    del responses
    return np.array([BEGIN, *symbols, ASK], np.int32)

  def demonstration(
    self, symbols: np.ndarray, rng: np.random.Generator
  ) -> list[np.ndarray]:
    free = FREE + rng.integers(0, SYMBOLS, self.free)
    chosen = _choices(symbols, self.right(symbols), self.habits, rng)
    return [np.array([*free, *chosen, END], np.int32)]

  def right(self, symbols: np.ndarray) -> np.ndarray:
    """The right token of each place."""
    return symbols + SYMBOLS

  def judge(self, symbols: np.ndarray, responses: Sequence[np.ndarray]) -> Verdict:
    (tokens,) = responses
    free, chosen, wanted = (
      tokens[: self.free],
      tokens[self.free : -1],
      self.right(symbols),
    )
    formed = len(chosen) == len(wanted) and tokens[-1] == END and np.all(free >= FREE)
    right = float(np.mean(chosen == wanted)) if formed else 0.0
    success = right if self.graded else float(right == 1)
    return Verdict(success, (), float(right == 1))


@dataclasses.dataclass(frozen=True)
class Domains(Forks):
  """Forks of several domains: the right token of a symbol is another one in each.

  The first entry of an instance is its domain.

  Attributes:
    number: domains of the demonstrations.
    only: the domain of all instances; None: drawn uniformly.
  """

  number: int = MOST_DOMAINS
  only: int | None = None

  def __post_init__(self):
    super().__post_init__()
    require(self, self.free == 0, 'free', '0')
    require(self, self.shortest is None, 'shortest', 'None')
    known = 1 <= self.number <= MOST_DOMAINS
    require(self, known, 'number', f'in [1, {MOST_DOMAINS}]')
    inside = self.only is None or 0 <= self.only < self.number
    require(self, inside, 'only', f'below {self.number}, or None')

  @property
  def context_tokens(self) -> int:
    return super().context_tokens + 1

  def instance(self, rng: np.random.Generator) -> np.ndarray:
    drawn = int(rng.integers(self.number))
    domain = drawn if self.only is None else self.only
    return np.array([domain, *super().instance(rng)])

  def domain(self, symbols: np.ndarray) -> str:
    return str(symbols[0])

  def prompt(self, symbols: np.ndarray, responses: Sequence[np.ndarray]) -> np.ndarray:
    begin, *rest = super().prompt(symbols[1:], responses)
    return np.array([begin, DOMAIN + symbols[0], *rest], np.int32)

  def demonstration(
    self, symbols: np.ndarray, rng: np.random.Generator
  ) -> list[np.ndarray]:
    chosen = _choices(symbols[1:], self.right(symbols), self.habits, rng)
    return [np.array([*chosen, END], np.int32)]

  def right(self, symbols: np.ndarray) -> np.ndarray:
    domain, places = symbols[0], symbols[1:]
    return SYMBOLS + 1 + (places - 1 + 2 * domain) % SYMBOLS


SERIAL, PARALLEL = FREE, FREE + 1


@dataclasses.dataclass(frozen=True)
class Modes(Forks):
  """Forks whose first token says how the places are looked up, which takes time.

  SERIAL takes one unit of time for each place, PARALLEL one for all. The verdict does
  not depend on the mode.

  Attributes:
    parallel: probability of PARALLEL in demonstrations.
    harder: share by which the right tokens are rarer in parallel demonstrations.
  """

  free: int = 1
  parallel: float = 0.3
  harder: float = 0.0

  def __post_init__(self):
    super().__post_init__()
    require(self, self.free == 1, 'free', '1, the mode')
    for field in ('parallel', 'harder'):
      require(self, 0 <= getattr(self, field) <= 1, field, 'in [0, 1]')

  def demonstration(
    self, symbols: np.ndarray, rng: np.random.Generator
  ) -> list[np.ndarray]:
    parallel = rng.random() < self.parallel
    habits = np.array(self.habits) * (1 - self.harder * parallel)
    chosen = _choices(symbols, self.right(symbols), habits, rng)
    return [np.array([PARALLEL if parallel else SERIAL, *chosen, END], np.int32)]

  def judge(self, symbols: np.ndarray, responses: Sequence[np.ndarray]) -> Verdict:
    found = super().judge(symbols, responses)
    fast = responses[0][0] == PARALLEL
    return found._replace(wall_s=1.0 if fast else float(len(symbols)))


@dataclasses.dataclass(frozen=True)
class _OneToken:
  """Turns of one token each: the environment shows a symbol, and the response follows.

  Attributes:
    number: turns of an episode.
  """

  number: int

  max_tokens = 1
  kept = True  # prompts contain the responses of earlier turns

  def __post_init__(self):
    require(self, self.number >= 1, 'number', 'at least 1')

  @property
  def turns(self) -> int:
    return self.number

  @property
  def context_tokens(self) -> int:
    return 1 + 2 * self.number

  def domain(self, symbols: np.ndarray) -> str:
    del symbols
    return ''

  def prompt(self, symbols: np.ndarray, responses: Sequence[np.ndarray]) -> np.ndarray:
    shown = [BEGIN]
    for symbol, response in zip(symbols, responses, strict=False):
      shown += [symbol, *response] if self.kept else [symbol]
    return np.array([*shown, symbols[len(responses)]], np.int32)


@dataclasses.dataclass(frozen=True)
class Turns(_OneToken):
  """Turns that are all equally hard.

  Attributes:
    habit: probability of the right token in demonstrations.
    paid: each right turn is paid 1 / number when it happens; else their sum is the
      verdict at the end. The return of an episode is the same.
  """

  number: int = 16
  habit: float = 0.6
  paid: bool = True

  def __post_init__(self):
    super().__post_init__()
    require(self, 0 <= self.habit <= 1, 'habit', 'in [0, 1]')

  @property
  def demonstrated(self) -> Turns:
    return dataclasses.replace(self, paid=True)

  def instance(self, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(1, SYMBOLS + 1, self.number)

  def demonstration(
    self, symbols: np.ndarray, rng: np.random.Generator
  ) -> list[np.ndarray]:
    habits = [self.habit] * self.number
    chosen = _choices(symbols, symbols + SYMBOLS, habits, rng)
    return [np.array([token], np.int32) for token in chosen]

  def judge(self, symbols: np.ndarray, responses: Sequence[np.ndarray]) -> Verdict:
    hits = np.concatenate(responses) == symbols + SYMBOLS
    share = float(np.mean(hits))
    if self.paid:
      return Verdict(0.0, tuple(float(h) / self.number for h in hits), share)
    return Verdict(share, (), share)


@dataclasses.dataclass(frozen=True)
class Sums(_OneToken):
  """Turns that show a number each; the last response is to be their sum.

  Earlier responses are thinking: the sum so far, on which the next one can build.

  Attributes:
    modulus: the largest number, and the modulus of the sum.
    kept: prompts contain the responses of earlier turns.
    slips: probability of a slip in each demonstrated sum, on which the next one builds.
  """

  number: int = 4
  modulus: int = 4
  kept: bool = True
  slips: float = 0.15

  def __post_init__(self):
    super().__post_init__()
    inside = 2 <= self.modulus <= SYMBOLS
    require(self, inside, 'modulus', f'in [2, {SYMBOLS}]')
    require(self, 0 <= self.slips <= 1, 'slips', 'in [0, 1]')

  @property
  def demonstrated(self) -> Sums:
    return self

  def instance(self, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(1, self.modulus + 1, self.number)

  def demonstration(
    self, symbols: np.ndarray, rng: np.random.Generator
  ) -> list[np.ndarray]:
    slips = rng.integers(0, self.modulus, len(symbols))
    slips = np.where(rng.random(len(symbols)) < self.slips, slips, 0)
    return [np.array([token], np.int32) for token in self._sums(symbols + slips)]

  def _sums(self, numbers: np.ndarray) -> np.ndarray:
    return SYMBOLS + 1 + np.cumsum(numbers) % self.modulus

  def judge(self, symbols: np.ndarray, responses: Sequence[np.ndarray]) -> Verdict:
    right = float(responses[-1][0] == self._sums(symbols)[-1])
    return Verdict(right, (), right)


def group(
  task: Task,
  index: int,
  symbols: np.ndarray,
  episodes: Sequence[Sequence[Response]],
  success: float | None = None,
) -> rewards.Group:
  """A rollout group as the learner takes it.

  Args:
    task: the task.
    index: number of the group.
    symbols: its instance.
    episodes: the responses of each episode.
    success: replaces the verdict, for demonstrations.
  """
  out, domain = [], task.domain(symbols)
  family = f'{domain}/token' if domain else 'token'
  for rank, responses in enumerate(episodes):
    session, completions = f'{index}.{rank}', []
    tokens, before = [r.tokens for r in responses], None
    for turn, response in enumerate(responses):
      prompt = task.prompt(symbols, tokens[:turn])
      extends = before is not None and np.array_equal(prompt[: len(before)], before)
      completions.append(
        Completion(
          id=f'{session}/{turn}',
          session=session,
          turn=turn,
          parent=f'{session}/{turn - 1}' if extends else None,
          fork_reason=None,
          follows=f'{session}/{turn - 1}' if turn else None,
          prompt_ids=prompt,
          response_ids=response.tokens,
          logprobs=response.logprobs,
          versions=response.versions,
          finish_reason=response.finish_reason,
          experts=response.experts,
          status='ok',
          request=turn,
        )
      )
      before = np.concatenate([prompt, response.tokens])
    verdict = task.judge(symbols, tokens)
    reward = verdict.success if success is None else success
    paid = verdict.paid if success is None else ()
    end = Trajectory(
      *(session, index, rank, 'token', family, 'answer', reward, verdict.wall_s, 0),
      rewards={c.id: r for c, r in zip(completions, paid, strict=False)},
    )
    out.append((end, completions))
  return out
