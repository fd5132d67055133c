"""benchmarks.claims: tasks, verdicts, the rule of the set-up, and an arm of seconds."""

from __future__ import annotations

import dataclasses
import math
import subprocess
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.claims import claim as claim_lib
from benchmarks.claims import tasks, training, verdicts
from benchmarks.claims.aged import Config as Aged
from benchmarks.claims.rows import window
from m2jax.pool import windows
from m2jax.rl import rewards


def test_verdict_of_forks():
  """All places, none of them a copy, and nothing else."""
  forks = tasks.Forks(habits=(0.5, 0.5), free=1)
  symbols = np.array([3, 5])
  free, right = tasks.FREE + 2, symbols + tasks.SYMBOLS
  good = [free, *right, tasks.END]
  assert forks.prompt(symbols, []).tolist() == [tasks.BEGIN, 3, 5, tasks.ASK]
  judge = lambda task, tokens: task.judge(symbols, [np.array(tokens)])
  assert judge(forks, good).success == 1
  for bad in (
    [free, right[0], 5, tasks.END],  # copied
    [free, *right, free],  # cut off
    [*right, tasks.END],  # without the free token
    [3, *right, tasks.END],
    [tasks.END],
  ):
    assert judge(forks, bad).success == judge(forks, bad).right == 0
  graded = dataclasses.replace(forks, graded=True)
  half = judge(graded, [free, right[0], 5, tasks.END])
  assert half.success == 0.5 and half.right == 0
  assert graded.demonstrated == forks


def test_modes_take_time():
  """Parallel is faster and as right; its demonstrations are less often right."""
  task, symbols = tasks.Modes(habits=(1.0, 1.0), harder=0.5), np.array([3, 5])
  right = symbols + tasks.SYMBOLS
  found = [
    task.judge(symbols, [np.array([mode, *right, tasks.END])])
    for mode in (tasks.SERIAL, tasks.PARALLEL)
  ]
  assert [v.wall_s for v in found] == [2.0, 1.0] and [v.right for v in found] == [1, 1]
  rng, hits = np.random.default_rng(0), {tasks.SERIAL: [], tasks.PARALLEL: []}
  for _ in range(1000):
    (tokens,) = task.demonstration(symbols, rng)
    hits[tokens[0]] += [*(tokens[1:-1] == right)]
  assert np.mean(hits[tasks.SERIAL]) == 1.0
  assert 0.4 < np.mean(hits[tasks.PARALLEL]) < 0.6
  assert 0.2 < len(hits[tasks.PARALLEL]) / 2000 < 0.4


def test_turns_pay_what_the_end_would():
  """Paid turns and the verdict at the end have equal returns, and prompts extend."""
  paid = tasks.Turns(number=4)
  whole = dataclasses.replace(paid, paid=False)
  symbols = np.array([1, 2, 3, 4])
  responses = [np.array([t]) for t in (9, 2, 11, 4)]
  one, other = (task.judge(symbols, responses) for task in (paid, whole))
  assert one.paid == (0.25, 0.0, 0.25, 0.0) and one.success == 0
  assert sum(one.paid) == other.success == one.right == other.right == 0.5
  assert paid.prompt(symbols, responses[:2]).tolist() == [0, 1, 9, 2, 2, 3]
  shown = [tasks.Response.written(tokens) for tokens in responses]
  lazy = [tasks.Response.written(np.array([x])) for x in symbols]
  group = tasks.group(paid, 0, symbols, [shown, lazy])
  found = rewards.advantages(group, rewards.RewardConfig(alpha=0.0))
  # G_t − B over the turns of the group: the last right turn is the third.
  assert found.credits[0].advantages.tolist() == [0.25, 0.125, 0.125, 0.0]


def test_domains_have_right_tokens_of_their_own():
  mixed, rng = tasks.Domains(habits=(1.0, 1.0)), np.random.default_rng(0)
  drawn = {int(mixed.instance(rng)[0]) for _ in range(50)}
  assert drawn == set(range(tasks.MOST_DOMAINS))
  rights = []
  for d in drawn:
    one = dataclasses.replace(mixed, only=d)
    symbols = one.instance(rng)
    assert symbols[0] == d
    assert one.prompt(symbols, [])[1] == tasks.DOMAIN + d < tasks.VOCABULARY
    shown = one.demonstration(symbols, rng)
    assert one.judge(symbols, shown).right == 1
    response = tasks.Response.written(shown[0])
    ((end, _),) = tasks.group(one, 0, symbols, [[response]])
    assert end.domain == one.domain(symbols) == str(d)
    assert mixed.judge(np.array([(d + 1) % 4, *symbols[1:]]), shown).right == 0
    rights.append(tuple(one.right(np.array([d, *range(1, 9)]))))
    assert sorted(rights[-1]) == [*range(9, 17)]
  assert len(set(rights)) == len(rights)


def test_sums_with_and_without_thinking():
  """The last sum decides; dropped prompts fork, and no number is missing in them."""
  kept, symbols = tasks.Sums(number=3, slips=0.0), np.array([1, 4, 3])
  dropped = dataclasses.replace(kept, kept=False)
  shown = kept.demonstration(symbols, np.random.default_rng(0))
  assert [int(t[0]) - 9 for t in shown] == [1, 1, 0]
  assert kept.judge(symbols, shown).success == 1
  assert kept.judge(symbols, [*shown[:2], shown[0]]).success == 0
  assert kept.judge(symbols, [shown[2], shown[2], shown[2]]).success == 1
  assert kept.prompt(symbols, shown[:2]).tolist() == [0, 1, 10, 4, 10, 3]
  assert dropped.prompt(symbols, shown[:2]).tolist() == [0, 1, 4, 3]
  episode = [*map(tasks.Response.written, shown)]
  parents = [
    [c.parent for c in tasks.group(task, 0, symbols, [episode])[0][1]]
    for task in (kept, dropped)
  ]
  assert parents == [[None, '0.0/0', '0.0/1'], [None, None, None]]


def test_demonstrations_have_the_habit():
  forks, rng = tasks.Forks(habits=(0.1, 0.8), shortest=1), np.random.default_rng(0)
  hits, shown = np.zeros(2), np.zeros(2)
  for _ in range(2000):
    symbols = forks.instance(rng)
    (tokens,) = forks.demonstration(symbols, rng)
    n = len(symbols)
    hits[:n] += tokens[:-1] == symbols + tasks.SYMBOLS
    shown[:n] += 1
  np.testing.assert_allclose(hits / shown, [0.1, 0.8], atol=0.04)
  assert 900 < shown[1] < 1100 and shown[0] == 2000


def by_seed(*values):
  return dict(enumerate(values))


def test_verdicts():
  """The strongest rival decides; all four kinds, and the seeds that are needed."""
  ours = by_seed(0.80, 0.82, 0.78, 0.81, 0.79)
  weak, strong = by_seed(*[0.1] * 5), by_seed(0.50, 0.53, 0.50, 0.52, 0.48)
  found = verdicts.strongest(ours, {'weak': weak, 'strong': strong})
  assert found.rival == 'strong' and found.kind == 'better' and found.level == 0.025
  assert '+0.294' in verdicts.sentence('ours', found)
  assert verdicts.difference('ours', strong, ours).kind == 'worse'
  near = by_seed(0.81, 0.81, 0.78, 0.82, 0.78)
  assert verdicts.difference('near', ours, near).kind == 'equal'
  noisy = by_seed(0.9, 0.5, 0.95, 0.6, 0.75)
  unsure = verdicts.difference('noisy', ours, noisy)
  assert unsure.kind == 'undecided'
  needed = verdicts.seeds_needed(
    max(abs(unsure.mean), verdicts.MARGIN), unsure.deviation
  )
  assert f'about {needed} seeds' in verdicts.sentence('ours', unsure) and needed > 5
  assert verdicts.difference('one', {0: 1.0}, {0: 0.5}).kind == 'undecided'
  assert 'common seed' in verdicts.sentence(
    'ours', verdicts.difference('one', {0: 1.0}, {0: 0.5})
  )
  with pytest.raises(ValueError, match='no seed'):
    verdicts.difference('other', {0: 1.0}, {1: 1.0})
  assert verdicts.strongest({}, {'rival': ours}) is None


def test_intervals_and_power_by_simulation():
  """Intervals have their level, and the seeds that are needed have the power."""
  rng = np.random.default_rng(0)
  covered = []
  for _ in range(1000):
    noise = rng.normal(0.1, 0.2, 5)
    found = verdicts.difference('r', by_seed(*noise), by_seed(*[0.0] * 5), rivals=2)
    covered.append(abs(found.mean - 0.1) <= found.half)
  assert 0.96 <= np.mean(covered) <= 0.99
  n = verdicts.seeds_needed(0.1, 0.2)
  shown = []
  for _ in range(1000):
    noise = rng.normal(0.1, 0.2, n)
    shown.append(verdicts.difference('r', by_seed(*noise), by_seed(*[0.0] * n)).kind)
  assert 0.76 <= np.mean([kind == 'better' for kind in shown]) <= 0.84
  assert verdicts.seeds_needed(0.001, 1.0) is None
  assert verdicts.seeds_needed(0.1, 0.0) == 2


def scored(trainer, condition, arm, rate, seed):
  """A run without training: arm b is best at 1e-3, a at 1e-4."""
  best = {'a': 1e-4, 'b': 1e-3}[arm]
  end = 0.5 + 0.1 * (arm == 'b') - 10 * abs(rate - best) + 0.001 * seed
  return dict(
    start=0.1, end=end, mean=end / 2, lowest=0.0, clipped=0.0, lag=0.0, episodes=10,
    cpu_s=60.0, wall_s=300.0, curve=[[0, 0.1], [5, end]],
  )  # fmt: skip


CLAIM = claim_lib.Claim(
  name='ab',
  question='a is better than b.',
  conditions=('<one>',),
  arms=('a', 'b'),
  subject='a',
  measure=scored,
  at_scale='nowhere',
  sizes=training.Sizes(updates=2),
)


def test_a_row_is_tuned_measured_and_reported(tmp_path):
  setup = claim_lib.Row(CLAIM, tmp_path).tune()
  assert setup['chosen'] == {'<one>': {'a': 1e-4, 'b': 1e-3}}
  runs = claim_lib.Row(CLAIM, tmp_path).measure(setup)
  assert {run['seed'] for run in runs} == set(claim_lib.SEEDS) and len(runs) == 10
  assert not {run['seed'] for run in runs} & set(claim_lib.TUNING_SEEDS)
  text = claim_lib.report(CLAIM, runs)
  assert '- <one>, success at the end: a is worse than b' in text
  assert 'CPU time of the measured runs: 10 minutes' in text
  root = ElementTree.fromstring(claim_lib.plot(CLAIM, runs))
  lines = [e for e in root.iter() if e.tag.endswith('polyline')]
  assert len(lines) == 4  # two curves, two entries of the legend


def test_the_time_limit_ends_a_row(tmp_path):
  """Tuning counts; what was measured is kept, and more time continues it."""
  with pytest.raises(claim_lib.SetupError, match='trials of tuning are left'):
    claim_lib.Row(CLAIM, tmp_path, hours=0.5).tune()
  setup = claim_lib.Row(CLAIM, tmp_path).tune()
  assert len(claim_lib.Row(CLAIM, tmp_path, hours=1.2).measure(setup)) == 3
  made = (tmp_path / 'ab.jsonl').read_text().splitlines()
  assert len(claim_lib.Row(CLAIM, tmp_path).measure(setup)) == 10
  assert (tmp_path / 'ab.jsonl').read_text().splitlines()[: len(made)] == made


def test_the_setup_is_committed_first(tmp_path):
  git = lambda *args: subprocess.run(
    ['git', '-c', 'user.name=n', '-c', 'user.email=e@x', '-C', tmp_path, *args],
    check=True,
    capture_output=True,
  )
  folder = tmp_path / 'claims' / 'setups'
  folder.parent.mkdir()
  git('init')
  with pytest.raises(claim_lib.SetupError, match='is missing'):
    claim_lib.committed_setup(CLAIM, folder)
  setup = {'settings': CLAIM.settings, 'chosen': {}}
  path = claim_lib.save_setup(CLAIM, setup, folder)
  with pytest.raises(claim_lib.SetupError, match='not committed'):
    claim_lib.committed_setup(CLAIM, folder)
  git('add', '.')
  with pytest.raises(claim_lib.SetupError, match='not committed'):
    claim_lib.committed_setup(CLAIM, folder)
  git('commit', '-m', 'setup')
  found = claim_lib.committed_setup(CLAIM, folder)
  assert found['chosen'] == {} and len(found['commit']) >= 7
  git('commit', '--allow-empty', '-m', 'other')
  assert claim_lib.committed_setup(CLAIM, folder) == found  # of the set-up
  path.write_text(path.read_text() + ' ')
  with pytest.raises(claim_lib.SetupError, match='not committed'):
    claim_lib.committed_setup(CLAIM, folder)
  other = dataclasses.replace(CLAIM, sizes=training.Sizes(updates=3))
  with pytest.raises(claim_lib.SetupError, match='other settings'):
    claim_lib.committed_setup(other, folder)


@pytest.mark.parametrize('name', claim_lib.NAMES)
def test_rows_are_complete(name):
  """Each has its name, its subject among the arms, and rivals."""
  claim = claim_lib.load(name)
  assert claim.name == name and claim.subject in claim.arms
  assert set(claim.arms) - {claim.subject, *claim.bounds}
  assert set(claim.bounds) <= set(claim.arms) and claim.at_scale


def test_window_arms():
  """In equal time a slower arm has the success of the moment; the limit is a rule."""
  base = dict(condition='c', seed=0)
  fast = base | dict(time=10.0, curve=[[0, 0.0], [10, 1.0]])
  slow = base | dict(time=40.0, curve=[[0, 0.0], [40, 1.0]])
  found = window.in_equal_time([fast, slow])
  assert [run['equal_time'] for run in found] == [1.0, 0.25]
  rule = Aged(updates=4)
  queue = windows.Queue(head=7, next_index=30, capacity=16, age=0, per_update=8)
  assert rule.end(queue) is None and rule.end(queue._replace(age=17)) == 8
  items, instances = window.stream(500, 0)
  places = np.array([len(symbols) for symbols in instances])
  assert np.corrcoef(places, np.log(items.latency))[0, 1] > 0.7


@pytest.mark.long
def test_an_arm_learns():
  """CISPO on fresh data raises success, from the start that all arms of a seed have."""
  sizes = training.Sizes(updates=12, groups=4, size=8, evaluated=64, sft_steps=80)
  trainer = training.Trainer(sizes)
  task = tasks.Forks(habits=(0.3,))
  runs = [
    trainer.run(training.Arm(task, kind, age=age), 1e-3, 0)
    for kind, age in (('cispo', 0), ('grpo', 2))
  ]
  assert runs[0]['start'] == runs[1]['start'] and runs[0]['end'] > runs[0]['start']
  assert [round(run['lag'], 1) for run in runs] == [0.0, pytest.approx(1.8, abs=0.3)]
  assert math.isfinite(runs[0]['entropy']) and len(runs[0]['curve']) == 12


@pytest.mark.long
def test_samplers_differ_in_precision():
  """Each rounding adds to the mismatch, experts are replayed, and tasks follow."""
  sizes = training.Sizes(updates=2, groups=2, size=4, evaluated=8, sft_steps=20)
  trainer, task = training.Trainer(sizes), tasks.Domains((0.5, 0.5), graded=True)
  half, each = 'bfloat16', tuple(dataclasses.replace(task, only=d) for d in (0, 1))
  samplers = (
    training.Sampler(),
    training.Sampler(half, record_experts=True),
    training.Sampler(half, head=half),
  )
  runs = [
    trainer.run(training.Arm(task, sampler=s, after=each, evaluated=each), 1e-4, 0)
    for s in samplers
  ]
  exact, rounded, head = (run['mismatch'] for run in runs)
  assert exact < 0.01 < rounded < head
  assert all(len(run['ends']) == 2 and run['episodes'] == 16 for run in runs)
