"""The comparison of prefill and decode together and apart: what it measures."""

from __future__ import annotations

import pytest

from benchmarks import disaggregation, disaggregation_worker, rollout_workload
from benchmarks.disaggregation_worker import Server
from tests.rollout import conftest as small


def answer(first, gaps):
  short = dict(kind='short', first_s=first, gaps_s=gaps)
  long = dict(kind='long', first_s=2.0, gaps_s=[9.0])
  return dict(requests=[short, long], elapsed_s=3.0)


def test_percentiles_are_of_short_requests():
  """A gap of a long one is no latency that is compared."""
  found = disaggregation.percentiles(answer(0.5, [0.1] * 99 + [0.4]))
  assert found['first p50'] == 500 and found['long first p99'] == 2000
  assert found['gap p50'] == pytest.approx(100) and 100 < found['gap p99'] < 400
  assert found['short'] == found['long'] == 1 and found['elapsed_s'] == 3.0


def test_ratios_are_of_each_round(capsys):
  rounds = lambda *gaps: [disaggregation.percentiles(answer(0.1, [g])) for g in gaps]
  quiet = {'together': rounds(0.1), 'apart': rounds(0.1)}
  heavy = {'together': rounds(0.2, 0.6, 0.3), 'apart': rounds(0.1, 0.2, 0.3)}
  disaggregation.show({'quiet': quiet, 'heavy prefill': heavy})
  out = capsys.readouterr().out
  assert 'gap p99, together / apart: 2.00 (1.00 to 3.00)' in out


@pytest.mark.long
def test_a_server_plays_both_kinds(monkeypatch):
  """Every request is served, and each of its deliveries is timed."""
  monkeypatch.setattr(disaggregation_worker, 'model_config', lambda: small.CFG)
  monkeypatch.setattr(
    disaggregation_worker, 'engine_config', lambda: small.ENGINE_CONFIG
  )
  monkeypatch.setattr(rollout_workload, 'VOCABULARY', small.CFG.vocab_size)
  server = Server(None, 4, [1])
  kinds = dict(
    short=dict(rate=20, prompt=6, new=9), long=dict(rate=5, prompt=40, new=1)
  )
  try:
    found = server.play(1, 1.0, 0, kinds)
  finally:
    server.schedulers[1].stop()
  short = [r for r in found['requests'] if r['kind'] == 'short']
  long = [r for r in found['requests'] if r['kind'] == 'long']
  assert found['sampled_tokens'] == 9 * len(short) + len(long)
  assert len(short) > 5 and long and all(len(r['gaps_s']) == 2 for r in short)
  assert all(r['first_s'] > 0 and not r['gaps_s'] for r in long)
