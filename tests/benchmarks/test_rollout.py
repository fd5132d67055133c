"""The comparison of rollout engines: what it serves and how it reports."""

from __future__ import annotations

import pytest

from benchmarks import (
  prefix_memory,
  rollout,
  rollout_profile,
  rollout_worker,
  rollout_workload,
)
from m2jax import sharding


def test_sessions_extend_their_past():
  """A prefix cache can be judged only if prompts go on from prompts and responses."""
  given = rollout_workload.Sessions(
    count=3, turns=4, system_tokens=5, task_tokens=2, turn_tokens=3, new_tokens=2
  )
  prompts = {session: [] for session in range(3)}

  def serve(step):
    waiting = [(session, None) for session in range(3)]
    while waiting:
      session, response = waiting.pop(0)
      prompt = step(session, response)
      if prompt is not None:
        prompts[session].append((prompt, response))
        waiting.append((session, [len(prompt), session]))

  counts = rollout_workload.play(given, 0, serve)
  assert counts == dict(prompt_tokens=3 * (7 + 12 + 17 + 22), new_tokens=3 * 4 * 2)
  assert len({tuple(p[0][0][:5]) for p in prompts.values()}) == 1
  assert len({tuple(p[0][0]) for p in prompts.values()}) == 3
  for turns in prompts.values():
    for (before, _), (after, response) in zip(turns, turns[1:], strict=False):
      assert after[: len(before) + 2] == before + response


def test_ratios_are_of_each_round(capsys):
  """Load on the machine changes from round to round, for all sides alike."""
  answer = lambda tokens, seconds: dict(tokens=tokens, seconds=seconds, cpu_s=1.0)
  sides = {
    'm2jax': [answer(100, 1), answer(100, 2), answer(100, 4)],
    'vllm': [answer(100, 2), answer(100, 4), answer(100, 4)],
  }
  memory = dict(budget_pages=9, peak_pages=7, budget_bytes=90, cache_bytes=80)
  rollout.show(
    dict(versions=dict(m2jax='jax 1'), found={'8 requests': sides}, memory=memory)
  )
  out = capsys.readouterr().out
  assert '7 pages at once of 9' in out and '80 bytes of 90' in out
  assert '2.00 (1.00 to 2.00)' in out and '50' in out.split('m2jax', 2)[2]


@pytest.mark.long
def test_the_worker_serves_sessions(monkeypatch):
  """Our side runs the whole of it, and finds the past of each turn in its cache. The
  profile accounts for all the time, and for the attention in decode calls."""
  small = {**rollout_workload.MODEL, 'num_layers': 1}
  monkeypatch.setattr(rollout_workload, 'MODEL', small)
  server = rollout_worker.Server(
    2, look_ahead=False, mesh=sharding.MeshConfig(), wrap=rollout_profile.Timed
  )
  requests = dict(requests=3, prompt=5, new=4)
  try:
    batch = server.batches(seeds=[0, 1], **requests)
    found = server.sessions(seed=0, count=2, turns=3)
    memory = server.memory(prompt=5, new=4)
    long = dict(requests=3, prompt=64, new=64)
    parts = rollout_profile.profile(server, lambda: server.batch(seed=0, **long))
  finally:
    server.scheduler.stop()
  assert 0 < memory['peak_pages'] <= memory['budget_pages']
  assert memory['cache_bytes'] == memory['budget_bytes'] > 0
  assert batch['tokens'] == 2 * 12 and len(batch['first']) == 4
  assert found['tokens'] == 2 * 3 * 32
  assert found['hit_tokens'] > 0.6 * found['prompt_tokens']
  of_decode = {k: x for k, x in parts.items() if k.endswith('of decode')}
  assert parts['exchange of decode'] == 0 <= parts['no operation of decode'] < 1
  scopes = [f'{scope} of decode' for scope in (*rollout_profile.SCOPES, 'other')]
  assert sum(parts[scope] for scope in scopes) == pytest.approx(1)
  assert parts['attention of decode'] > 0 and parts['moe of decode'] > 0
  times = [x for k, x in parts.items() if k != 'seconds' and k not in of_decode]
  assert sum(times) == pytest.approx(parts['seconds']) and min(times) >= 0
  assert 'decode calls |' in rollout_profile.table({'batch': parts})


@pytest.mark.thorough
def test_more_memory_saves_prefill(capsys):
  """Few pages find less than enough of them, unless there is more memory; and a second
  engine finds in the pool what the first has written."""
  prefix_memory.FLAGS(['', '--sessions=2', '--turns=2', '--rounds=2', '--share=0.1'])
  found = prefix_memory.compare()
  few, enough = found['few pages'], found['enough pages']
  assert few['host']['prefill_tokens'] < few['device']['prefill_tokens']
  assert few['pool, again']['prefill_tokens'] < few['pool']['prefill_tokens']
  assert few['pool, again']['pool_hit_tokens'] > 0
  assert enough['host']['prefill_tokens'] == enough['device']['prefill_tokens']
  prefix_memory.show(found)
  assert capsys.readouterr().out.count('pages |') == 8


@pytest.mark.parametrize(
  'name', ['all-gather.3', 'all_gather', 'reduce_scatter', 'psum']
)
def test_collectives_are_found_by_name(name):
  """In every way that versions of jax write them."""
  assert rollout_profile.EXCHANGE.search(name)
