"""The evaluator: attempts of a scaffold at tasks. Scaffolds cannot reach it.

`InProcess` runs the white-box agent against a gateway in this process, episodes
concurrently. The seed of an attempt is the engine's: two scaffolds with the same task
and seed draw the same random numbers as long as their prompts are the same.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from absl import logging

from m2jax.agents import episodes
from m2jax.evolve.scaffold import Scaffold
from m2jax.observe import printable, progress
from m2jax.records import Completion, Trajectory

_TEXT_CHARACTERS = 3000  # of a trajectory that a proposer is shown
INVALID = 'invalid'  # the end of an attempt that the scaffold's settings prevent


@dataclasses.dataclass(frozen=True)
class Result:
  """One attempt.

  Attributes:
    score: the verdict in [0, 1]; None after an infrastructure failure.
    end_reason: how it ended (`agents.Outcome`), or `INVALID`.
    tokens: tokens of all prompts and responses.
    text: its trajectory for the proposer, cut.
  """

  score: float | None
  end_reason: str = 'answer'
  tokens: int = 0
  text: str = ''


class Evaluator(Protocol):
  """Runs attempts."""

  def run(
    self, scaffold: Scaffold, specs: Sequence[str], seeds: Sequence[int]
  ) -> list[Result]:
    """One attempt a spec and seed, in their order."""


class InProcess:
  """Attempts at tasks through a gateway; see `tokens.add` for what they cost."""

  def __init__(
    self,
    config: episodes.EpisodeConfig,
    base_url: str,
    sessions: episodes.Sessions,
    tokens: Tokens,
    check: Callable[[], None] = lambda: None,
  ):
    """Makes an evaluator.

    Args:
      config: how episodes run; `config.agent` is the base of every scaffold's agent.
      base_url, sessions: the gateway's.
      tokens: counts the gateway's completions.
      check: called while episodes run; its exceptions end the evaluation.
    """
    self._config, self._base_url, self._sessions = config, base_url, sessions
    self._tokens, self._check = tokens, check

  def run(
    self, scaffold: Scaffold, specs: Sequence[str], seeds: Sequence[int]
  ) -> list[Result]:
    """See `Evaluator.run`. An attempt that is late or fails twice has no score."""
    agent = scaffold.agent(self._config.agent)
    config = dataclasses.replace(self._config, agent=agent)
    ends_s = time.monotonic() + config.evaluation_deadline_s
    with episodes.Runner(config, self._base_url, self._sessions) as runner:
      asked = list(zip(specs, seeds, strict=True))
      futures = [self._start(runner, *one) for one in asked]
      found = []
      for one, future in zip(asked, futures, strict=True):
        progress.report('evaluating', len(found), len(asked))
        ended = self._wait(future, ends_s)
        if ended is None or ended.end_reason == 'infrastructure':
          if time.monotonic() < ends_s:
            ended = self._wait(self._start(runner, *one), ends_s)
        found.append(self._result(ended))
    return found

  def _start(self, runner: episodes.Runner, spec: str, seed: int):
    options = dict(prefix='evolve', mode='evaluation', sampling={'seed': seed})
    return runner.group(spec, 1, **options)

  def _wait(
    self, future: concurrent.futures.Future, ends_s: float
  ) -> Trajectory | Result | None:
    """The trajectory, None if it is late, or the result of an invalid scaffold."""
    self._check()
    while not future.done() and (left_s := ends_s - time.monotonic()) > 0:
      concurrent.futures.wait([future], timeout=min(1.0, left_s))
      self._check()
    if not future.done():
      future.cancel()
      return None
    try:
      return future.result()[0]
    except ExceptionGroup as errors:  # such as two tools that are renamed to one
      if not isinstance(error := errors.exceptions[0], ValueError):
        raise
      logging.warning('the scaffold cannot run: %s', printable.one_line(error, 200))
      return Result(0.0, INVALID)

  def _result(self, ended: Trajectory | Result | None) -> Result:
    if isinstance(ended, Result):
      return ended
    if ended is None or ended.end_reason == 'infrastructure':
      return Result(None, 'infrastructure')
    return Result(
      float(ended.success),
      ended.end_reason,
      self._tokens.take(ended.session),
      '' if ended.success == 1 else transcript(ended.messages),
    )


class Tokens:
  """Counts the tokens of completions by session; `add` is the gateway's recorder."""

  def __init__(self):
    self._lock = threading.Lock()
    self._found: collections.Counter[str] = collections.Counter()

  def add(self, completion: Completion) -> None:
    with self._lock:
      tokens = len(completion.prompt_ids) + len(completion.response_ids)
      self._found[completion.session] += tokens

  def take(self, session: str) -> int:
    """The tokens of a session, which is then forgotten."""
    with self._lock:
      return self._found.pop(session, 0)


def transcript(messages: Sequence[Mapping[str, Any]]) -> str:
  """A chat as text; the middle of a long one is left out."""
  lines = []
  for message in messages:
    calls = [call['function'] for call in message.get('tool_calls') or ()]
    called = ''.join(f'\n  call {c["name"]} {c["arguments"]}' for c in calls)
    thought = message.get('reasoning_content') or ''
    thought = f'\n  thought: {thought}' if thought else ''
    lines.append(f'{message["role"]}: {message.get("content") or ""}{thought}{called}')
  text, half = '\n'.join(lines), _TEXT_CHARACTERS // 2
  text = text.encode(errors='replace').decode()  # no lone surrogates
  return text if len(text) <= 2 * half else f'{text[:half]}\n[…]\n{text[-half:]}'
