"""Episodes: one agent, one task, one sandbox, one gateway session, one verdict.

`Runner` runs them concurrently, in an event loop on a thread of its own. Agents reach
the model over HTTP only. The gateway records what they sampled; this module returns how
each episode ended.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import inspect
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from absl import logging

from m2jax import agents, sandbox, tasks
from m2jax.agents.agent import AgentConfig
from m2jax.records import Trajectory

_CLOSE_S = 60.0  # for cancelled episodes to end


class Sessions(Protocol):
  """Registry of the episodes' keys: the gateway's `sessions`, or a client of it.

  What a method returns is awaited if it can be. An OSError of `open` ends the episode
  as an infrastructure failure.
  """

  def open(self, key: str, mode: str = 'training', name: str | None = None) -> Any: ...

  def close(self, key: str) -> Any: ...


@dataclasses.dataclass(frozen=True)
class EpisodeConfig:
  """How episodes run.

  Attributes:
    agent: settings of the agent.
    backend: backend of the sandbox, one of `sandbox.api.BACKENDS`; or, for tasks in
      containers, 'podman', 'docker' or 'harbor:NAME'.
    limits: limits of the sandbox.
    concurrency: maximum concurrent episodes, separately for training and evaluation.
    evaluation_deadline_s: time limit of an evaluation as a whole; episodes that have
      not ended by then are infrastructure failures.
    verdict_timeout_s: time limit of a reward; an episode whose verifier takes longer is
      an infrastructure failure.
    model: name of the model in requests.
  """

  agent: AgentConfig = dataclasses.field(
    default_factory=lambda: AgentConfig.of_kind('whitebox')()
  )
  backend: str = 'namespaces'
  limits: sandbox.Limits = sandbox.Limits(cpu_s=2, wall_s=5.0)
  concurrency: int = 64
  evaluation_deadline_s: float = 1200.0
  verdict_timeout_s: float = 1800.0
  model: str = 'm2jax'


class Runner:
  """Runs episodes submitted from any thread; a context manager."""

  def __init__(self, config: EpisodeConfig, base_url: str, sessions: Sessions):
    self._config = config
    self._base_url = base_url
    self._sessions = sessions
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._run_loop, name='agents', daemon=True)
    # One per mode, so that an evaluation does not queue behind training.
    self._running = {
      mode: asyncio.Semaphore(config.concurrency) for mode in ('training', 'evaluation')
    }
    self._agent: agents.Agent | None = None

  def __enter__(self) -> Runner:
    self._thread.start()
    return self

  def __exit__(self, *exc):
    """Cancels the running episodes and waits for the loop to end, up to `_CLOSE_S`."""
    closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
    try:
      closing.result(_CLOSE_S)
    except concurrent.futures.TimeoutError:
      logging.error(
        'the episodes have not ended %g s after they were cancelled: code of an agent '
        'or a task blocks, or ignores its cancellation',
        _CLOSE_S,
      )
      return  # its thread ends with the process
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join()
    self._loop.close()

  def responds(self, timeout_s: float) -> bool:
    """Whether the loop gets to run within a time: no episode's code blocks it."""
    ran = threading.Event()
    self._loop.call_soon_threadsafe(ran.set)
    return ran.wait(timeout_s)

  def _run_loop(self):
    asyncio.set_event_loop(self._loop)
    self._loop.run_forever()

  async def _close(self):
    current = asyncio.current_task()
    others = [t for t in asyncio.all_tasks() if t is not current]
    for other in others:
      other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    if self._agent is not None:
      await self._agent.close()
    await sandbox.shutdown()

  def group(
    self,
    spec: str,
    count: int,
    *,
    item: int = -1,
    prefix: str = 'episode',
    mode: str = 'training',
    sampling: dict[str, Any] | None = None,
    on_end: Callable[[Trajectory], None] | None = None,
  ) -> concurrent.futures.Future[list[Trajectory]]:
    """Starts `count` episodes of one task; the future has their results by rank.

    Args:
      spec: spec of the task.
      count: number of trajectories.
      item: index of the work item, -1 outside training.
      prefix: prefix of the sessions' names in records; their keys are random.
      mode: mode of the sessions, 'training' or 'evaluation'.
      sampling: additional fields of each request.
      on_end: called with each trajectory as it ends, on the loop's thread.
    """
    return asyncio.run_coroutine_threadsafe(
      self._group(spec, count, item, prefix, mode, sampling, on_end), self._loop
    )

  async def _group(self, spec, count, item, prefix, mode, sampling, on_end):
    task = tasks.make(spec)

    async def one(rank):
      trajectory = await self._episode(task, item, rank, prefix, mode, sampling)
      if on_end is not None:
        on_end(trajectory)
      return trajectory

    async with asyncio.TaskGroup() as group:  # an exception cancels the others
      running = [group.create_task(one(rank)) for rank in range(count)]
    return [task.result() for task in running]

  async def _episode(self, task, item, rank, prefix, mode, sampling) -> Trajectory:
    async with self._running[mode]:
      key, name = f'key-{secrets.token_urlsafe(24)}', f'{prefix}-{uuid.uuid4().hex}'
      try:
        outcome, success = await self._act(task, key, name, mode, sampling or {})
      finally:
        await _settled(self._sessions.close(key))
    ended = {**vars(outcome), 'messages': tuple(outcome.messages)}
    del ended['tools']
    return Trajectory(
      session=name,
      item=item,
      rank=rank,
      task=task.spec,
      family=task.family,
      success=success,
      **ended,
    )

  async def _act(
    self,
    task: tasks.Task,
    key: str,
    name: str,
    mode: str,
    sampling: dict[str, Any],
  ) -> tuple[agents.Outcome, float]:
    """Opens the session and runs the episode; returns its outcome and success."""
    if self._agent is None:
      self._agent = agents.make(self._config.agent)
    agent, config = self._agent, self._config
    endpoint = agents.Endpoint(self._base_url, key, config.model, sampling)
    try:
      await _settled(self._sessions.open(key, mode, name))
      opened = agents.open_task(agent, task, config.backend, config.limits)
      async with opened as environment:
        episode = await agent.prepare(task, environment, endpoint)
        outcome = await agents.run_within(agent, task, episode)
        success = await self._verdict(agent, task, environment, outcome)
        outcome.error = outcome.error or '\n'.join(environment.notes)
    except (sandbox.SandboxError, OSError) as error:
      logging.warning('episode of %s: %r', task.spec, error)
      outcome = agents.Outcome(end_reason='infrastructure', error=repr(error))
      success = 0.0
    return outcome, success

  async def _verdict(self, agent, task, environment, outcome) -> float:
    limit_s = self._config.verdict_timeout_s
    try:
      async with asyncio.timeout(limit_s) as limit:
        return await agent.reward(task, environment, outcome)
    except sandbox.SandboxPathError as error:  # a link or a pipe where a file should be
      logging.warning('no success for %s: %r', task.spec, error)
      return 0.0
    except TimeoutError as error:
      if not limit.expired():
        raise
      raise TimeoutError(
        f'no verdict within {limit_s:g} s (episodes.verdict_timeout_s)'
      ) from error


async def _settled(result: Any) -> None:
  if inspect.isawaitable(result):
    await result


def evaluate(
  runner: Runner,
  specs: Sequence[str],
  *,
  temperature: float = 1.0,
  deadline_s: float = 1200.0,
  on_end: Callable[[Trajectory], None] | None = None,
  check: Callable[[], None] = lambda: None,
) -> list[Trajectory]:
  """Runs one episode per task, in evaluation sessions with untruncated sampling.

  Episodes that end with an infrastructure failure are retried once. Those that fail
  twice, or have not ended after `deadline_s`, are returned with the end reason
  'infrastructure', for the caller to count separately.

  Args:
    runner: runs them.
    specs: specs of the tasks.
    temperature: sampling temperature.
    deadline_s: deadline of the whole evaluation.
    on_end: called with each result.
    check: called every second while episodes run; its exceptions end the evaluation.
  """
  ends_s = time.monotonic() + deadline_s

  def result(spec, future) -> Trajectory:
    check()
    while not future.done() and (left_s := ends_s - time.monotonic()) > 0:
      concurrent.futures.wait([future], timeout=min(1.0, left_s))
      check()
    try:
      (trajectory,) = future.result(timeout=0)
    except concurrent.futures.TimeoutError:
      future.cancel()
      trajectory = Trajectory(
        session=f'eval-{uuid.uuid4().hex}',
        item=-1,
        rank=0,
        task=spec,
        family=tasks.make(spec).family,
        end_reason='infrastructure',
        error=f'the evaluation did not end within {deadline_s:g} s',
        success=0.0,
        wall_s=deadline_s,
        tool_calls=0,
      )
    return trajectory

  sampling = {'temperature': temperature, 'top_p': 1.0, 'top_k': 0}
  options = dict(prefix='eval', mode='evaluation', sampling=sampling)
  futures = [runner.group(spec, 1, **options) for spec in specs]
  out = []
  for spec, future in zip(specs, futures, strict=True):
    trajectory = result(spec, future)
    if trajectory.end_reason == 'infrastructure' and time.monotonic() < ends_s:
      trajectory = result(spec, runner.group(spec, 1, **options))
    if on_end is not None:
      on_end(trajectory)
    out.append(trajectory)
  return out
