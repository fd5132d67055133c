"""Episodes of a `verifiers` environment as tasks."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
import secrets
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from m2jax import sandbox
from m2jax.checks import require
from m2jax.tasks import task as task_lib
from m2jax_pipelines.tasks import foreign
from m2jax_pipelines.tasks.verifiers import process

_ENV = re.compile(r'[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?')
_PARTS = 10  # of the rows: 8 train, 1 dev, 1 held_out
_PART = {'dev': (8,), 'held_out': (9,), 'train': tuple(range(8))}


@dataclasses.dataclass(frozen=True)
class Config(foreign.ForeignConfig):
  """Distribution of the episodes.

  Attributes:
    env: id of the environment's taskset, as for verifiers' own `vf-eval`.
    python: interpreter in which it is installed, with verifiers 0.4; '' is this one.
    settings: settings of the taskset, such as {'split': 'train'}.
    evaluation: those that differ for the splits dev and held_out, which then share the
      rows of these settings, half each. Empty: of ten rows, eight train.
    rows: only the first rows; 0: all. Needed if the taskset has no end.
    shared: all splits have all rows, for a taskset of a few: evaluations then say
      nothing about other tasks.
    start_s: time limit of the environment's start and of opening an episode, in which
      it starts the task's tool servers.
  """

  kind: str = 'verifiers'
  env: str = ''
  python: str = ''
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  evaluation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  rows: int = 0
  shared: bool = False
  start_s: float = 300.0

  def __post_init__(self):
    super().__post_init__()
    good = not self.env or bool(_ENV.fullmatch(self.env))
    require(self, good, 'env', 'the id of a taskset')
    require(self, self.rows >= 0, 'rows', '0 or more')
    require(self, self.start_s > 0, 'start_s', 'positive')


@dataclasses.dataclass(frozen=True)
class _Open(task_lib.Environment):
  """session: key of the episode in its process."""

  running: process.Process | None = None
  session: str = ''


@dataclasses.dataclass(frozen=True)
class VerifiersTask:
  """A `tasks.Task`; what it asks and offers is known when it is open."""

  spec: str
  split: str
  seed: int
  index: int
  config: Config
  instruction: str = ''
  tools: Sequence[Mapping[str, Any]] = ()
  baseline_calls: int = 1

  @property
  def family(self) -> str:
    return self.config.env

  @property
  def max_tool_calls(self) -> int:
    return self.config.max_turns

  @contextlib.asynccontextmanager
  async def open(
    self, *, backend: str = '', limits: sandbox.Limits | None = None
  ) -> AsyncIterator[task_lib.Environment]:
    """Starts an episode of the environment; see `tasks.Task.open`.

    The environment is a library that the user installed, and is not sandboxed.
    """
    c = self.config
    settings = dict(c.settings)
    if self.split != 'train':
      settings |= c.evaluation
    env = {'env': c.env, 'settings': settings, 'max_turns': c.max_turns}
    running = process.running(c.python or sys.executable, env)
    session = secrets.token_hex(8)

    async def respond(message: Mapping[str, Any]) -> list[dict] | None:
      kept = ('role', 'content', 'reasoning_content', 'tool_calls')
      said = {k: message[k] for k in kept if message.get(k)}
      said.setdefault('content', '')
      return await running.request(
        'turn', c.timeout_s, session=session, message={'role': 'assistant', **said}
      )

    row = self._row(await running.request('size', c.start_s))
    try:
      first = await running.request('open', c.start_s, session=session, row=row)
      instruction = '\n\n'.join(message['content'] for message in first['messages'])
      yield _Open(
        foreign.no_tool,
        instruction=instruction,
        tools=first['tools'],
        respond=respond,
        running=running,
        session=session,
      )
    finally:
      with contextlib.suppress(sandbox.SandboxError):
        await running.request('close', c.timeout_s, session=session)

  async def verify(self, environment: task_lib.Environment, answer: str) -> float:
    """The episode's weighted rewards, on the scale of `reward_range`."""
    assert isinstance(environment, _Open) and environment.running is not None
    reward = await environment.running.request(
      'reward', self.config.timeout_s, session=environment.session
    )
    return foreign.verdict(self.spec, reward, self.config)

  def _row(self, size: int | None) -> int:
    """The row of this index: every epoch has each row of the split once."""
    c = self.config
    if size is None and not c.rows:
      raise sandbox.SandboxError(
        f'task {self.spec}: the taskset {c.env!r} has no end: set tasks.rows'
      )
    size = min(n for n in (size, c.rows or size) if n is not None)
    rows = list(range(size))
    if c.evaluation and self.split != 'train':
      rows = rows[('dev', 'held_out').index(self.split) :: 2]
    elif not c.evaluation and not c.shared:
      rows = [n for n in rows if n % _PARTS in _PART[self.split]]
    if not rows:
      raise sandbox.SandboxError(
        f'task {self.spec}: of {size} rows of {c.env!r} none is left for '
        f'{self.split}: set tasks.evaluation, or tasks.shared'
      )
    epoch, place = divmod(self.index, len(rows))
    random.Random(f'{self.split}/{self.seed}/{epoch}').shuffle(rows)
    return rows[place]


def families(config: Config) -> Mapping[str, float]:
  """One family, the environment's id."""
  return dict(config.weights) or {config.env: 1.0}


def spec(
  split: str, index: int, seed: int, config: Config, family: str | None = None
) -> str:
  """The spec of the index-th episode; see `tasks.spec`."""
  if not config.env:
    raise ValueError('set tasks.env, the id of the taskset')
  return foreign.spec(config, 'env', split, index, seed)


def make(spec: str) -> VerifiersTask:
  """The task of a spec, without starting anything. Raises ValueError if it is none."""
  split, seed, index, config = foreign.parse(spec, Config, 'env')
  return VerifiersTask(spec, split, seed, index, config)


@dataclasses.dataclass(frozen=True)
class TeacherConfig(foreign.TeacherConfig):
  """A scripted teacher."""

  kind: str = 'verifiers'
