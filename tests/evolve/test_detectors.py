"""Detectors on runs that an independent generator made: no false alarm, each fault."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from m2jax.evolve import doctor
from m2jax.evolve.doctor import flow, history, pool, robust
from m2jax.forge.config import ForgeConfig
from tests.evolve import runs

CONFIG = {
  'rl': {
    **{'capacity': 16, 'window': 'default', 'groups_per_step': 8},
    'learner': {'step': {'bias_update_rate': 1e-3}},
  }
}
EXACT = CONFIG | {
  'model': {'dtype': 'float32', 'matmuls': {'kind': 'plain'}},
  'engine': {'cache_dtype': None, 'weights_dtype': None},
  'scheduler': {'reuse_stale_prefix': False},
}


@pytest.fixture
def diagnose(tmp_path):
  """Findings of records by kind, five seconds after the last one."""

  def run(records, config=CONFIG, after_s=5.0, **signs):
    runs.write(tmp_path, records)
    found = history.read(tmp_path)
    now_s = max((r['time_s'] for r in records), default=0.0) + after_s
    out = {}
    for x in doctor.of_history(found, config, flow.Signs(now_s, True, **signs)):
      out.setdefault(x.kind, x)
    return out

  return run


@pytest.mark.parametrize('shape', runs.SHAPES)
@pytest.mark.parametrize('make', [runs.rl, runs.sft])
def test_no_alarm_in_healthy_runs(make, shape, diagnose):
  """Short and long ones; with a healthy prefix a run is only a longer healthy run."""
  for seed in range(4):
    for n in (1, 28, 250):
      assert not diagnose(make(shape, seed, n), EXACT), (seed, n)


@pytest.mark.parametrize('length', [3000])
def test_no_alarm_in_a_long_run(length, diagnose):
  assert not diagnose(runs.rl('log_normal', 1, length), EXACT)
  assert not diagnose(runs.sft('heavy_tail', 1, length), EXACT)


START, N = 60, 120  # the first faulty record, and the number of records


def _set(name, value):
  """A fault that sets, or multiplies, one value."""

  def fault(row, i, rows):
    row[name] = value(row[name], i) if callable(value) else value

  return fault


def _stopped_publishing(row, i, rows):
  row['policy/lag_mean'] = 1.5 + i


def _longer(row, i, rows):
  row['generated_length/1024'] = 500
  row['success'] = 0.5


def _lost(name, each):
  def fault(row, i, rows):
    row[name] += each * (i + 1)

  return fault


def _blocked(row, i, rows):
  row['pool/completed'], row['wait_s'] = 14, 0.95 * row['step_s']


def _saturated(success):
  def fault(row, i, rows):
    row['success'] = success
    row['groups_zero_advantage'] = row['groups']

  return fault


def _slow_saves(row, i, rows):
  if i % 4 == 0:
    row['checkpoint/save_s'] = 15.0


# (fault, records, kind) of each; where a fault is in all records, START is 0.
FAULTS = {
  'nan': (_set('loss', None), runs.rl, 'not_finite'),
  'infinite': (_set('grad_norm', math.inf), runs.sft, 'not_finite'),
  'skipped': (_set('skipped', 1), runs.rl, 'not_finite'),
  'spike': (_set('loss', lambda x, i: x * (9 if i < 4 else 1)), runs.sft, 'loss_spike'),
  'diverges': (_set('loss', lambda x, i: x + 0.1 * i), runs.sft, 'loss_divergence'),
  'gradient': (_set('grad_norm', lambda x, i: 30 * x), runs.rl, 'gradient_jump'),
  'collapse': (_set('entropy', lambda x, i: x / 40), runs.rl, 'entropy_collapse'),
  'explosion': (_set('entropy', lambda x, i: 9 * x), runs.rl, 'entropy_explosion'),
  'ratio': (_set('ratio', lambda x, i: x + 1), runs.rl, 'ratio_drift'),
  'ratio_low': (_set('ratio', lambda x, i: x / 2), runs.rl, 'ratio_drift'),
  'log_ratio': (_set('abs_log_ratio', lambda x, i: 40 * x), runs.rl, 'ratio_drift'),
  'clipping': (_set('clip_fraction', 0.12), runs.rl, 'clipping'),
  'weights': (_set('mismatch/mean', 3e-3), runs.rl, 'weights_differ'),
  'experts': (_set('max_violation', lambda x, i: 6 * x), runs.rl, 'expert_imbalance'),
  'solved': (_saturated(1.0), runs.rl, 'reward_saturation'),
  'graders': (_set('success', lambda x, i: 0.4 * x), runs.rl, 'success_falls'),
  'hopeless': (_saturated(0.0), runs.rl, 'reward_absent'),
  'alike': (_saturated(0.5), runs.rl, 'zero_advantage'),
  'longer': (_longer, runs.rl, 'length_growth'),
  'publishing': (_stopped_publishing, runs.rl, 'weights_not_published'),
  'stale': (_set('policy/lag_mean', lambda x, i: 8 * x), runs.rl, 'staleness'),
  'slow': (_set('rollouts_per_s', lambda x, i: x / 20), runs.rl, 'throughput_drop'),
  'sandboxes': (_set('trajectories_masked', 40), runs.rl, 'infrastructure'),
  'failed': (_lost('pool/failed', 3), runs.rl, 'failed_items'),
  'workers': (_lost('pool/reissued', 8), runs.rl, 'dead_worker'),
  'stragglers': (_blocked, runs.rl, 'window_blocked'),
  'forks': (_lost('gateway/forks', 900), runs.rl, 'forks'),
  'mask': (_set('trained/tool', 0.2), runs.sft, 'loss_mask'),
  'ends': (_set('trained/ends', 0.0), runs.sft, 'loss_mask'),
  'mask_rl': (_set('trained/prompt', 0.01), runs.rl, 'loss_mask'),
  'bias': (_set('router_bias_rms', 0.2), runs.rl, 'router_bias_frozen'),
  'version': (_set('engine/version', START), runs.rl, 'weights_not_published'),
  'saves': (_slow_saves, runs.rl, 'slow_storage'),
  'disk': (_set('disk/free_bytes', 5e8), runs.rl, 'low_disk'),
}


@pytest.mark.parametrize('shape', ['white', 'log_normal', 'correlated'])
@pytest.mark.parametrize('name', FAULTS)
def test_each_fault_is_found_where_it_begins(name, shape, diagnose):
  """Within eight records of its first one, and never in the records before."""
  fault, make, kind = FAULTS[name]
  for seed in range(2):
    records = make(shape, seed, N)
    for i, row in enumerate(records[START:]):
      fault(row, i, records)
    found = diagnose(records, EXACT)
    assert kind in found, (seed, sorted(found))
    steps = [r['step'] for r in records]
    at = steps.index(found[kind].first_step)
    assert START - 1 <= at <= START + 12, (seed, at, found[kind].summary)
    assert not diagnose(records[:START], EXACT)
    shown = found[kind].evidence[0]
    assert shown.values and shown.calibration


def test_faults_of_a_whole_run(diagnose):
  """Those without a healthy past: a bias that is frozen, a cap below usual ratios,
  rewards against success, success that falls."""
  frozen = runs.rl('log_normal', 0, N)
  for row in frozen:
    row['max_violation'] *= 6
    row['clip_fraction'] = 0.4
    row['reward'] = 1 - row['success']
  found = diagnose(frozen)
  assert {'router_bias_frozen', 'clipping', 'reward_sign'} <= set(found)
  falling = runs.rl('white', 0, N)
  for i, row in enumerate(falling):
    row['success'] = row['reward'] = 0.7 - 0.6 * i / N + 0.03 * math.sin(i)
  assert 'success_falls' in diagnose(falling)
  # A tie in success is no rank: a reward of speed that falls is not against it.
  for i, row in enumerate(falling):
    row['success'] = 1.0 if i > 8 else 0.9
    row['reward'] = 1 - i / N
  assert 'reward_sign' not in diagnose(falling)


def test_settings_that_the_records_contradict(diagnose):
  """A schedule that ends early, a clip range below usual ratios."""
  records = runs.rl('white', 0, N)
  schedule = {'kind': 'linear', 'total_steps': START, 'final_fraction': 0.0}
  rl = {'optimizer': {'name': 'adam', 'schedule': schedule}}
  rl['learner'] = {'estimator': {'kind': 'grpo', 'clip_low': 3e-4, 'clip_high': 4e-4}}
  found = diagnose(records, {'rl': rl})
  assert found.keys() == {'schedule_ended', 'clipping'}
  assert found['schedule_ended'].first_step == START + 1
  for name, value in ('final_fraction', 0.1), ('total_steps', N - 5), ('kind', 'wsd'):
    rl['optimizer']['schedule'] = schedule | {name: value}
    rl['learner']['estimator'].update(clip_low=0.2, clip_high=0.2)
    assert bool(diagnose(records, {'rl': rl})) == (name == 'kind')
  del rl['optimizer']['schedule']['kind']  # settings are untrusted
  assert not diagnose(records, {'rl': rl})


def test_a_full_queue_explains_a_lag_that_rises(diagnose):
  """The first updates of a long queue see its samples grow old, one version a step."""
  records = runs.rl('white', 0, N)
  for i, row in enumerate(records):
    row['policy/lag_mean'] = min(i, 20)
  assert 'weights_not_published' in diagnose(records)
  long = {'rl': {'capacity': 128, 'window': None, 'groups_per_step': 8}}
  assert not diagnose(records, long)


def test_silence(diagnose):
  """Relative to the run's own cadence of 5 s; a finished run is silent for good."""
  records = runs.rl('white', 0, N)
  assert not diagnose(records, after_s=100.0)
  assert 'stuck' in diagnose(records, after_s=130.0)
  assert not diagnose(records, after_s=130.0, finished=True)
  assert not diagnose(records, after_s=130.0, newest_s=records[-1]['time_s'] + 60)
  assert not diagnose(records[:5], after_s=130.0)
  for row in records[START:]:
    row['time_s'] += 400
  found = diagnose(records)
  assert found['pause'].last_step == records[START]['step']
  # Neither an evaluation nor another process is a pause.
  between = records[START]['time_s'] - 100
  evaluation = runs.record('eval', 60, between, {'family': 'all', 'n': 4})
  assert not diagnose([*records[:START], evaluation, *records[START:]])
  for row in records[START:]:
    row['lineage'] = 1
  assert not diagnose(records)


def test_storage(diagnose):
  """Time between updates is saving, unless an evaluation is in it."""
  records = runs.rl('white', 0, N)
  for i, row in enumerate(records):
    row['time_s'] += 40.0 * (i // 4)
  assert 'slow_storage' in diagnose(records)
  with_evaluations = []
  for i, row in enumerate(records):
    if i % 4 == 0:
      with_evaluations.append(runs.record('eval', i, row['time_s'] - 1, {'n': 4}))
    with_evaluations.append(row)
  assert not diagnose(with_evaluations)


def test_mismatch_of_low_precision(diagnose):
  """bfloat16 rounds: hundredths of a nat are its noise, and a jump is not."""
  records = runs.rl('log_normal', 0, N)
  for row in records:
    row['mismatch/mean'] *= 5e3  # 0.01
    row['mismatch/max'] = 1.0
    row['mismatch/mixed_max'] = 5.0
  assert not diagnose(records)
  assert 'mismatch' in diagnose(records, EXACT)  # from the first record
  for row in records[START:]:
    row['mismatch/mean'] *= 20
  assert diagnose(records)['mismatch'].first_step == START + 1


@pytest.mark.parametrize('seed', range(20))
def test_shifts_agree_with_a_loop(seed):
  """The windows of `robust` against a definition without them."""
  rng = np.random.default_rng(seed)
  x = rng.lognormal(0, 0.4, 90)
  x[50:] *= 6
  expected = [
    i
    for i in range(24, len(x) - 5 + 1)
    if np.median(x[i : i + 5]) > 3 * np.sort(x[i - 24 : i])[round(0.9 * 23)]
  ]
  found = robust.shifts(x, before=24, after=5, factor=3.0)
  assert bool(found) == bool(expected)
  if found:
    assert expected[0] <= found[0][0] <= expected[0] + 4 and found[0][0] >= 48


def test_correlation_is_pearsons():
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=(2, 100))
  moments = [100, x.sum(), y.sum(), (x * y).sum(), (x * x).sum(), (y * y).sum()]
  expected = np.corrcoef(x, y)[0, 1]
  assert pool.correlation([float(m) for m in moments]) == pytest.approx(expected)
  assert pool.correlation([100, 0.0, 0.0, 0.0, 0.0, 0.0]) is None
  assert pool.correlation([100, None, 0.0, 0.0, 0.0, 0.0]) is None


def test_causes_name_fields_that_exist():
  """Every field of the tables is one of the main job's config, in its phases."""
  import typing

  from experiments import fields
  from m2jax.evolve.doctor import causes, rules

  def has(kind, path):
    for name in path.split('.'):
      options = [k for k in fields.kinds_of(kind) if dataclasses.is_dataclass(k)]
      assert options, (path, name)
      hints = typing.get_type_hints(options[0])
      if name not in hints:
        # Of tasks and agents each kind has its own.
        return hasattr(options[0], 'of_kind')
      kind = hints[name]
    return True

  templates = {field for kind in causes.KINDS.values() for _, field in kind.causes}
  templates |= {rule.field for of in rules.RULES.values() for rule in of}
  assert set(rules.RULES) <= set(causes.KINDS)
  for template in filter(None, templates):
    for phase in ('sft', 'rl'):
      field = causes.field_of(template, phase, {})
      assert has(ForgeConfig, field), field


def test_counters_of_a_process_begin_anew(diagnose):
  """A restart sets what a process counts to 0, which loses nothing."""
  records = runs.rl('white', 0, N)
  for i, row in enumerate(records):
    row['pool/reissued'] = 500 if i % 20 < 10 else 0
    row['gateway/forks'] = 10_000 + i if i < START else i - START
    row['lineage'] = i // 10
  found = diagnose([{**row, 'pool/reissued': 0} for row in records])
  assert not found
  for i, row in enumerate(records):
    row['pool/reissued'] = 500 if i < START else 0
  assert not diagnose(records)


def test_a_bias_that_may_stand_still(diagnose):
  """Its rate is 0, or pre-training has ended its updates."""
  records = runs.rl('white', 0, N)
  for row in records:
    row['router_bias_rms'] = 0.3
  frozen = {'rl': {'learner': {'step': {'bias_update_rate': 0.0}}}}
  assert not diagnose(records, frozen)
  assert 'router_bias_frozen' in diagnose(records)
  trained = runs.sft('white', 0, N)
  for row in trained:
    row |= {'phase': 'pretrain', 'router_bias_rms': 0.3}
  assert not diagnose(trained, {'step': {'bias_update_rate': 1e-3}})


def test_a_bias_that_runs_away(diagnose):
  """It grows by its rate at every update, and the load stays uneven."""
  records = runs.rl('white', 0, N)
  for i, row in enumerate(records):
    row['router_bias_rms'] = 8e-4 * i
  assert not diagnose(records)
  for row in records:
    row['max_violation'] *= 4
  assert 'router_bias_runs_away' in diagnose(records)


def test_an_engine_that_reports_late(diagnose):
  """Once a second, while updates take a tenth of one."""
  records = runs.rl('white', 0, N)
  for i, row in enumerate(records):
    row['time_s'] = 1.7e9 + 0.1 * i
    row['engine/version'] = i // 14 * 14
  assert 'weights_not_published' not in diagnose(records)


@pytest.mark.parametrize('seed', range(8))
def test_a_fall_is_where_welchs_t_is_largest(seed):
  """Against the definition, at every place."""
  rng = np.random.default_rng(seed)
  x = rng.normal(0.6, 0.2, 60)
  x[35:] -= 0.3
  places = range(12, 60 - 12 + 1)
  sides = [(x[max(0, i - 20) : i], x[i : i + 20]) for i in places]
  expected = [
    (a.mean() - b.mean()) / math.sqrt(a.var() / len(a) + b.var() / len(b))
    for a, b in sides
  ]
  at, before, after, t = robust.fall(x, 20, 12)
  best = int(np.argmax(expected))
  assert at == places[best] and t == pytest.approx(expected[best])
  assert (before, after) == pytest.approx([side.mean() for side in sides[best]])
  assert robust.fall(x[:20], 20, 12) == (0, 0.0, 0.0, 0.0)
