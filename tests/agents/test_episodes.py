"""Episodes by a scripted policy, through the real gateway and the real sandbox."""

import collections
import concurrent.futures
import contextlib
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from m2jax import sandbox
from m2jax.agents import episodes, whitebox
from m2jax.rl import rewards
from m2jax.tasks import terminal
from m2jax.tasks.terminal import shell
from tests.gateway.conftest import response_text
from tests.waiting import wait_until

AGENT = whitebox.WhiteboxConfig(max_tokens=400, retry_delay_s=0.01)
WRONG = response_text('no idea', 'none of it')


def specs_of(*families, split='held_out'):
  return [terminal.spec(split, i, family=name) for i, name in enumerate(families)]


def perfect(tok, specs):
  """A policy: the teacher's next turn after the observations in the prompt."""
  tasks = [terminal.make(spec) for spec in specs]

  def policy(request):
    prompt = tok.decode(request.prompt_ids)
    [task] = [task for task in tasks if task.instruction in prompt]
    observations = re.findall('<response>(.*?)</response>', prompt, re.DOTALL)
    lesson = terminal.FAMILIES[task.family].teach(task.params, lambda kind: False)
    try:
      for printed in [None, *observations]:
        thought, command = lesson.send(printed)
    except StopIteration as end:
      return tok.encode(response_text(end.value.thought, end.value.content))
    call = (shell.NAME, {shell.ARGUMENT: command})
    return tok.encode(response_text(thought, calls=[call]))

  return policy


class Sessions:
  """The gateway's sessions; records names and keys in the order they were opened."""

  def __init__(self, gateway):
    self._sessions = gateway.sessions
    self.opened, self.keys = [], []

  def open(self, key, mode='training', name=None):
    self.opened.append((name, mode))
    self.keys.append(key)
    return self._sessions.open(key, mode, name)

  def close(self, key):
    self._sessions.close(key)


@pytest.fixture
def start(serve):
  """`start(policy, **EpisodeConfig) -> (runner, gateway, engine, records, sessions)`.

  The gateway accepts only the keys that the runner opens.
  """

  def start(policy, *, engine_options=None, **config):
    gateway, engine, records = serve(
      policy, accept_unknown_keys=False, engine_options=engine_options
    )
    config = episodes.EpisodeConfig(**{'agent': AGENT, 'concurrency': 8} | config)
    sessions = Sessions(gateway)
    runner = episodes.Runner(config, gateway.base_url, sessions)
    return runner, gateway, engine, records, sessions

  return start


def descendants():
  """Ids of the running descendants of this process."""
  found, parents = set(), [os.getpid()]
  while parents:
    with contextlib.suppress(OSError):  # it ended meanwhile
      for children in Path(f'/proc/{parents.pop()}/task').glob('*/children'):
        pids = {int(pid) for pid in children.read_text().split()}
        parents += pids - found
        found |= pids
  return {pid for pid in found if alive(pid)}


def alive(pid):
  try:
    stat = Path(f'/proc/{pid}/stat').read_text()
  except OSError:
    return False
  return stat.rpartition(')')[2].split()[0] not in 'ZX'


def supervisors(before):
  """The sandbox supervisors started since `before`."""
  children = set()
  for path in Path(f'/proc/{os.getpid()}/task').glob('*/children'):
    with contextlib.suppress(OSError):  # the thread ended meanwhile
      children.update(map(int, path.read_text().split()))
  return {pid for pid in children - before if alive(pid)}


def test_a_perfect_policy_solves_every_family(start, tok):
  """Real commands, real verdicts: correct solutions get success 1, in evaluation
  sessions with the requested sampling, and no session remains open."""
  specs = specs_of(*sorted(terminal.FAMILIES))
  runner, gateway, engine, records, sessions = start(perfect(tok, specs))
  ended = []
  with runner:
    out = episodes.evaluate(runner, specs, temperature=0.5, on_end=ended.append)
  assert [t.task for t in out] == specs and ended == out
  for trajectory in out:
    task = terminal.make(trajectory.task)
    assert (trajectory.end_reason, trajectory.success) == ('answer', 1.0), trajectory
    assert (trajectory.tool_calls, trajectory.tool_errors) == (task.baseline_calls, 0)
    assert (trajectory.item, trajectory.wall_s > 0) == (-1, True)
  assert sorted(t.family for t in out) == sorted(terminal.FAMILIES)
  assert {mode for _, mode in sessions.opened} == {'evaluation'}
  sampling = {(r.sampling.temperature, r.sampling.top_p) for r in engine.requests}
  assert sampling == {(0.5, 1.0)}
  assert len(sessions.opened) == len(specs) and len(gateway.sessions) == 0
  assert not gateway.counters().get('requests_total{status="401"}')


def test_a_group_is_one_task_by_ranks(start, tok):
  """Each rank has its own session, completions and files; the wrong answer is a judged
  failure, and `on_end` is called for each."""
  [spec] = specs_of('steps_1', split='train')
  right, asked = perfect(tok, [spec]), []

  def policy(request):
    if '<response>' in tok.decode(request.prompt_ids):
      return right(request)
    asked.append(request)  # first turns; the second episode gives up at once
    return tok.encode(WRONG) if len(asked) == 2 else right(request)

  runner, gateway, _, records, sessions = start(policy, concurrency=1)
  ended = []
  with runner:
    out = runner.group(spec, 3, item=7, prefix='rl-7', on_end=ended.append).result(60)
  assert [(t.item, t.rank, t.task) for t in out] == [
    (7, rank, spec) for rank in (0, 1, 2)
  ]
  assert [t.success for t in out] == [1.0, 0.0, 1.0]
  assert {t.end_reason for t in out} == {'answer'}
  assert ended == out
  assert [(t.session, 'training') for t in out] == sessions.opened
  turns = collections.Counter(record.session for record in records)
  assert [turns[t.session] for t in out] == [t.tool_calls + 1 for t in out]
  assert all(t.session.startswith('rl-7-') for t in out)
  assert len(gateway.sessions) == 0


def test_records_have_no_keys(start, tok):
  """Those who read the pool of a run can send no requests as one of its episodes."""
  [spec] = specs_of('steps_1', split='train')
  runner, _, _, records, sessions = start(perfect(tok, [spec]))
  with runner:
    out = runner.group(spec, 2, item=7, prefix='rl-7').result(60)
  assert {record.session for record in records} == {t.session for t in out}
  assert len(set(sessions.keys)) == 2
  for key in sessions.keys:
    assert key.partition('-')[2] not in repr((records, out))


def test_a_dead_sandbox_is_in_no_baseline(start, tok):
  """Law 5: the sandbox dies under one episode of a group. It ends as an infrastructure
  failure, the next ones get a new sandbox, and the group's advantages are those of the
  group without it."""
  [spec] = specs_of('steps_1', split='train')
  right, asked = perfect(tok, [spec]), []
  before = descendants()

  def policy(request):
    if '<response>' not in tok.decode(request.prompt_ids):
      asked.append(request)
      if len(asked) == 2:
        return tok.encode(WRONG)
      if len(asked) == 3:
        for pid in supervisors(before):
          os.kill(pid, signal.SIGKILL)
    return right(request)

  runner, gateway, _, records, _ = start(policy, concurrency=1)
  with runner:
    out = runner.group(spec, 4, item=0).result(60)
  assert [t.end_reason for t in out] == ['answer', 'answer', 'infrastructure', 'answer']
  assert [t.success for t in out if t.end_reason == 'answer'] == [1.0, 0.0, 1.0]
  assert 'supervisor' in out[2].error
  assert len(gateway.sessions) == 0

  group = [(t, [r for r in records if r.session == t.session]) for t in out]
  config = rewards.RewardConfig()
  assert len(group[2][1]) == 1  # it acted, so there is something to mask
  with_it = rewards.advantages(group, config).credits
  without = rewards.advantages(group[:2] + group[3:], config).credits
  assert with_it[2].masked and not with_it[2].completions
  for one, other in zip(with_it[:2] + with_it[3:], without, strict=True):
    assert one.reward == other.reward
    np.testing.assert_array_equal(one.advantages, other.advantages)


def test_evaluation_tries_infrastructure_once_more(start, tok):
  """A sandbox that dies once has no effect: the second attempt is judged."""
  specs = specs_of('steps_2', 'steps_1')
  right, killed = perfect(tok, specs), []
  before = descendants()

  def policy(request):
    if not killed:
      killed.extend(supervisors(before))
      for pid in killed:
        os.kill(pid, signal.SIGKILL)
    return right(request)

  runner, gateway, _, _, sessions = start(policy, concurrency=1)
  ended = []
  with runner:
    out = episodes.evaluate(runner, specs, on_end=ended.append)
  assert killed
  assert [(t.end_reason, t.success) for t in out] == [('answer', 1.0)] * 2
  assert ended == out  # the first attempt is not reported
  assert len(sessions.opened) == 3 and len(gateway.sessions) == 0


def test_what_fails_twice_is_not_judged(start, tok):
  """Files that do not fit the workspace fail before the first completion, in both
  attempts: no verdict, and the other tasks are judged."""
  specs = specs_of('steps_2', 'steps_1')
  limits = sandbox.Limits(workspace_bytes=4096, file_bytes=4096)
  runner, gateway, engine, _, sessions = start(perfect(tok, specs), limits=limits)
  ended = []
  with runner:
    out = episodes.evaluate(runner, specs, on_end=ended.append)
  assert {t.end_reason for t in out} == {'infrastructure'} and ended == out
  assert all(t.error for t in out)
  assert not engine.requests
  assert len(sessions.opened) == 4 and len(gateway.sessions) == 0


def test_a_workspace_that_cannot_be_read_is_the_agents_failure(start, tok, monkeypatch):
  """It put a link or a pipe where the verifier reads: masked, it would pay to."""
  [spec] = specs_of('steps_1')

  async def verify(self, environment, answer):
    raise sandbox.SandboxPathError('out.txt: is a link')

  monkeypatch.setattr(type(terminal.make(spec)), 'verify', verify)
  runner, *_ = start(lambda request: tok.encode(WRONG))
  with runner:
    [t] = runner.group(spec, 1).result(60)
  assert (t.end_reason, t.success) == ('answer', 0.0)


def test_what_cannot_be_recorded_ends_the_group(start, tok):
  """A full disk also ends the other ranks of the group."""
  [spec] = specs_of('steps_1')
  sleep = response_text('wait', calls=[('sh', {'cmd': 'sleep 600'})])
  first = []

  def policy(request):
    first.append(request)
    return tok.encode(WRONG if len(first) == 1 else sleep)

  def full(trajectory):
    raise OSError(f'no space for {trajectory.session}')

  runner, gateway, *_ = start(policy, limits=sandbox.Limits(wall_s=600.0))
  with runner:
    with pytest.raises(ExceptionGroup) as failed:
      runner.group(spec, 4, item=0, on_end=full).result(60)
    assert failed.group_contains(OSError, match='no space')
    assert len(gateway.sessions) == 0


@pytest.mark.parametrize('within', ['start', 'completion', 'command'])
def test_leaving_the_runner_ends_what_runs(start, tok, within):
  """Ctrl-C leaves nothing behind: no command, supervisor or session, and no completion
  in the engine."""
  [spec] = specs_of('steps_1', split='train')
  sleep = response_text('wait', calls=[('sh', {'cmd': 'sleep 600 & sleep 600'})])
  text, delay_s = ('on ' * 5000, 0.02) if within == 'completion' else (sleep, 0.0)
  before = descendants()
  runner, gateway, engine, _, sessions = start(
    lambda request: tok.encode(text),
    engine_options={'delay_s': delay_s},
    limits=sandbox.Limits(wall_s=600.0),
    agent=whitebox.WhiteboxConfig(max_tokens=5000),
  )

  def commands():
    return [p for p in descendants() - before if b'sleep' in command_line(p)]

  with runner:
    future = runner.group(spec, 3)
    if within == 'start':
      wait_until(lambda: sessions.opened)
    elif within == 'completion':
      wait_until(lambda: len(engine.requests) == 3)
    else:
      wait_until(lambda: len(commands()) >= 6)
    started = time.monotonic()
  assert time.monotonic() - started < 10
  with pytest.raises(concurrent.futures.CancelledError):
    future.result(0)
  assert not descendants() - before
  assert len(gateway.sessions) == 0
  if within == 'completion':
    wait_until(lambda: engine.cancelled['requests'] == 3)


def command_line(pid):
  try:
    return Path(f'/proc/{pid}/cmdline').read_bytes()
  except OSError:
    return b''


def test_a_task_may_limit_the_time_of_an_episode(start, tok, monkeypatch):
  """`Task.wall_s`: the command that runs is killed, and nothing is judged as right."""
  specs = specs_of('steps_1')
  monkeypatch.setattr(type(terminal.make(specs[0])), 'wall_s', 0.5, raising=False)
  slow = response_text('wait', calls=[(shell.NAME, {shell.ARGUMENT: 'sleep 600'})])
  runner, *_ = start(slow, limits=sandbox.Limits(wall_s=900.0))
  with runner:
    [found] = runner.group(specs[0], 1).result(120)
  assert (found.end_reason, found.success) == ('timeout', 0.0), found
  assert '0.5 s' in found.error
