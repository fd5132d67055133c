"""Composite reward, reward-to-go and group advantages against hand calculation."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2jax.records import Completion, Trajectory
from m2jax.rl import rewards
from m2jax.rl.rewards import RewardConfig


def episode(
  rank,
  success=1.0,
  statuses=('ok',),
  *,
  end_reason='answer',
  wall_s=1.0,
  tool_calls=1,
  tokens=2,
  finish='stop',
  messages=(),
):
  session = f's{rank}'
  completions = [
    Completion(
      id=f'{session}/{turn}',
      session=session,
      turn=turn,
      parent=None,
      fork_reason=None,
      prompt_ids=(1, 2, *range(turn)),
      response_ids=tuple(range(tokens)),
      logprobs=(-1.0,) * tokens,
      versions=(0,) * tokens,
      finish_reason=finish,
      status=status,
    )
    for turn, status in enumerate(statuses)
  ]
  trajectory = Trajectory(
    session,
    0,
    rank,
    't',
    'f',
    end_reason,
    success,
    wall_s,
    tool_calls,
    messages=messages,
  )
  return trajectory, completions


def advantages(group, **config):
  return rewards.advantages(group, RewardConfig(**config))


def test_composite_by_hand():
  """r_t = α·process + β·speed + perf, G_t = Σ γ^{τ−t} r_τ, Â = G_t − mean G_0.

  Two turns with a format error in the first, against a failure in one turn.
  """
  group = [
    episode(0, 1.0, ('invalid_json', 'ok'), wall_s=1.0),
    episode(1, 0.0, ('ok',), wall_s=3.0),
  ]
  credit = advantages(group, alpha=0.2, beta=0.4, gamma=0.5)
  # T_baseline = 2 s, h(1/2) = 0.75 and it is paid on success only.
  last = 0.4 * 0.75 + 1.0
  first = -0.2 + 0.5 * last
  baseline = (first + 0.0) / 2
  a, b = credit.credits
  np.testing.assert_allclose(a.advantages, [first - baseline, last - baseline])
  np.testing.assert_allclose(b.advantages, [-baseline])
  assert a.reward == rewards.TrajectoryReward(
    process=-1.0,
    speed=0.75,
    perf=1.0,
    total=pytest.approx(first),
  )
  assert credit.dropped == ''
  ungated = advantages(group, beta=0.4, speed_on_success_only=False)
  assert ungated.credits[1].reward.speed == pytest.approx(0.25)  # h(3/2)


@settings(deadline=None)
@given(st.lists(st.floats(-5, 5), max_size=12), st.floats(0, 1))
def test_returns_are_the_definition(r, gamma):
  """Reward-to-go equals the double sum."""
  n = len(r)
  expected = [sum(gamma ** (k - t) * r[k] for k in range(t, n)) for t in range(n)]
  np.testing.assert_allclose(rewards.returns(np.array(r), gamma), expected, atol=1e-9)


@pytest.mark.parametrize('kind', sorted(rewards.SPEEDS))
def test_speed_decreases(kind):
  """Every h is decreasing, with h(0) = 1 and h(1) = 1/2."""
  values = [rewards.speed(t, 2.0, kind) for t in np.linspace(0, 10, 50)]
  assert values == sorted(values, reverse=True) and values[0] == 1.0
  assert min(values) >= 0 and rewards.speed(2.0, 2.0, kind) == 0.5
  assert rewards.speed(1.0, 2.0, kind) > 0.5 > rewards.speed(3.0, 2.0, kind)
  assert rewards.speed(0.0, 0.0, kind) == 0.5


def test_speed_units():
  """T may be seconds, turns or tool calls; its baseline the group's mean or a value."""
  group = [
    episode(0, statuses=('ok',) * 3, wall_s=5.0, tool_calls=9),
    episode(1, statuses=('ok',), wall_s=15.0, tool_calls=1),
  ]
  for unit, first in (('wall', 0.75), ('turns', 0.25), ('tool_calls', 0.1)):
    credit = advantages(group, speed_unit=unit)
    assert credit.credits[0].reward.speed == pytest.approx(first)
  credit = advantages(group, speed_baseline=10.0)
  assert [c.reward.speed for c in credit.credits] == [0.75, 0.25]


GROUPS = st.lists(
  st.tuples(
    st.floats(0, 1),
    st.lists(st.sampled_from(['ok', 'invalid_json', 'unclosed_block']), max_size=4),
    st.floats(0.1, 9),
  ),
  min_size=1,
  max_size=6,
)
CONFIGS = st.builds(
  RewardConfig,
  alpha=st.floats(0, 1),
  beta=st.floats(0, 1),
  gamma=st.floats(0, 1),
  baseline=st.sampled_from(rewards.BASELINES),
  baseline_over=st.sampled_from([None, *rewards.BASELINE_OVERS]),
  normalise=st.sampled_from(rewards.NORMALISE),
  speed_unit=st.sampled_from(rewards.SPEED_UNITS),
)


def make_group(rows, start=0):
  return [
    episode(start + i, success, statuses, wall_s=wall_s)
    for i, (success, statuses, wall_s) in enumerate(rows)
  ]


@settings(deadline=None, max_examples=60)
@given(GROUPS, st.lists(st.integers(0, 6), max_size=4), CONFIGS)
def test_infrastructure_changes_nothing(rows, places, config):
  """Law 5: infrastructure failures in a group leave every other credit unchanged."""
  group = make_group(rows)
  broken = list(group)
  for k, place in enumerate(places):
    lost = episode(100 + k, 0.0, ('ok', 'ok'), end_reason='infrastructure', wall_s=99.0)
    broken.insert(place, lost)
  plain, mixed = (rewards.advantages(g, config) for g in (group, broken))
  kept = [c for c in mixed.credits if not c.masked]
  assert len(mixed.credits) - len(kept) == len(places)
  assert mixed.dropped == plain.dropped
  for a, b in zip(plain.credits, kept, strict=True):
    assert (a.trajectory, a.reward, a.completions) == (
      b.trajectory,
      b.reward,
      b.completions,
    )
    np.testing.assert_array_equal(a.advantages, b.advantages)
  for c in mixed.credits:
    assert not c.masked or (c.completions == () and len(c.advantages) == 0)


@settings(deadline=None, max_examples=60)
@given(GROUPS, CONFIGS)
def test_baselines(rows, config):
  """Group means of G_0 − B: 0 for the mean, and leave-one-out is it times n/(n−1)."""
  group = make_group(rows)
  n = len(group)
  by = {
    kind: rewards.advantages(
      group, dataclasses.replace(config, baseline=kind, normalise='none')
    )
    for kind in rewards.BASELINES
  }
  total = np.array([c.reward.total for c in by['none'].credits])
  for kind, expected in (
    ('none', total),
    ('mean', total - total.mean()),
    ('leave_one_out', (total - total.mean()) * (n / (n - 1) if n > 1 else 0)),
  ):
    for credit, a in zip(by[kind].credits, expected, strict=True):
      if len(credit.advantages):
        assert credit.advantages[0] == pytest.approx(a, abs=1e-9)


def flat(*groups):
  return np.concatenate([c.advantages for g in groups for c in g.credits])


def test_normalise():
  """The default is G − B; GRPO's form is in units of the group's deviation, and the
  batch's is one factor for all that is trained."""
  group = [episode(i, s) for i, s in enumerate((1.0, 0.0, 0.0, 0.0))]
  plain, scaled = advantages(group), advantages(group, normalise='group')
  std = np.std([1, 0, 0, 0])
  np.testing.assert_allclose(flat(plain), [0.75, -0.25, -0.25, -0.25])
  np.testing.assert_allclose(flat(scaled), flat(plain) / std)

  config = RewardConfig(beta=0.1, normalise='batch')
  fast = [episode(i, 1.0, wall_s=1 + 0.01 * i) for i in range(4)]
  alike = [episode(i, 0.0) for i in range(4)]
  batch = [rewards.advantages(g, config) for g in (group, fast, alike)]
  assert [g.dropped for g in batch] == ['', '', 'zero_advantage']
  out = rewards.scaled(batch, config)
  assert np.std(flat(*out[:2])) == pytest.approx(1.0)
  factor = np.std(flat(*batch[:2]))
  np.testing.assert_allclose(flat(*out), flat(*batch) / factor)
  assert rewards.scaled(batch, RewardConfig()) == batch
  assert rewards.scaled(batch[2:], config) == batch[2:]


def test_weights_of_the_reward_are_weights():
  """α and β scale what they pay, and a strategy that is paid less on the whole has a
  negative mean advantage. GRPO's division by the group's deviation loses both."""
  failures = [episode(i, 0.0, ('ok' if i else 'invalid_json',)) for i in range(16)]
  by_alpha = [flat(advantages(failures, alpha=a))[0] for a in (0.1, 0.001)]
  np.testing.assert_allclose(by_alpha, [-0.1 * 15 / 16, -0.001 * 15 / 16])
  equal = [episode(i, 1.0, wall_s=1 + 0.01 * i) for i in range(8)]
  assert np.abs(flat(advantages(equal, beta=0.5))).max() < 0.01
  assert np.abs(flat(advantages(equal, beta=0.5, normalise='group'))).max() > 1.5

  def parallel(normalise):
    """Mean advantage of faster calls, right in 9 of 10 groups; one by one always."""
    found = []
    for k in range(10):
      slow = [episode(i, 1.0, wall_s=1.1) for i in range(1, 8)]
      group = [episode(0, float(k > 0), wall_s=0.6), *slow]
      found.append(flat(advantages(group, beta=0.1, normalise=normalise))[0])
    return np.mean(found)

  assert parallel('none') < 0 < parallel('group')


def paid(rank, *by_turn, success=1.0):
  """An episode with a turn for each reward."""
  trajectory, completions = episode(rank, success, ('ok',) * len(by_turn))
  earned = {c.id: r for c, r in zip(completions, by_turn, strict=True)}
  return dataclasses.replace(trajectory, rewards=earned), completions


def test_paid_turns_by_hand():
  """r_t is what the turn was paid, with the success at the last; G_t is the reward to
  go, and B by default the mean G_t of the same turn."""
  group = [paid(0, 0.5, 0.0, 1.0), paid(1, 0.0, 2.0, success=0.0)]
  credit = advantages(group, gamma=0.5)
  to_go = [0.5 + 0.5 * (0.0 + 0.5 * 2.0), 0.5 * 2.0, 2.0], [0.5 * 2.0, 2.0]
  first, second = (np.mean([g[t] for g in to_go]) for t in (0, 1))
  a, b = credit.credits
  np.testing.assert_allclose(
    a.advantages, [to_go[0][0] - first, to_go[0][1] - second, 0]
  )
  np.testing.assert_allclose(b.advantages, [to_go[1][0] - first, to_go[1][1] - second])
  assert (a.reward.perf, a.reward.total) == (2.5, to_go[0][0])
  over = advantages(group, gamma=0.5, baseline_over='trajectory').credits[0]
  np.testing.assert_allclose(over.advantages, np.array(to_go[0]) - first)
  lost = dataclasses.replace(paid(2, 9.0)[0], end_reason='infrastructure'), []
  again = advantages([episode(0, 1.0, ('ok',) * 2), episode(1, 0.0, ('ok',) * 2), lost])
  np.testing.assert_allclose(flat(again), [0.5, 0.5, -0.5, -0.5])  # none is paid
  stray = dataclasses.replace(group[0][0], rewards={'msg': 1.0}), group[0][1]
  with pytest.raises(ValueError, match=r"task t, session s0: rewards for \['msg'\]"):
    advantages([stray])


def test_a_baseline_per_turn_needs_fewer_samples():
  """16 turns, each right with p = 0.6 and paid by itself: with the default the gradient
  has the signal-to-noise ratio of ten times as many samples as with the trajectory's
  baseline (15 in the limit)."""
  rng = np.random.default_rng(0)
  found = {None: [], 'trajectory': []}
  for _ in range(40):
    right = rng.random((16, 16)) < 0.6
    group = [paid(i, *map(float, row)) for i, row in enumerate(right)]
    for over, gradients in found.items():
      credit = advantages(group, baseline_over=over)
      by_turn = np.array([c.advantages for c in credit.credits])
      gradients.append((by_turn * (right - 0.6)).mean(0))
  ratio = {
    over: np.mean((np.mean(g, 0) / np.std(g, 0)) ** 2) for over, g in found.items()
  }
  assert ratio[None] > 10 * ratio['trajectory']


@pytest.mark.parametrize('success', [0.0, 1.0, 0.1])
def test_zero_advantage_groups_are_dropped(success):
  """Equal rewards have no gradient: dropped and counted, even if a mean is inexact."""
  alike = advantages([episode(i, success) for i in range(7)])
  mixed = advantages([episode(0, 1.0), episode(1, 0.0)])
  broken = advantages([episode(i, end_reason='infrastructure') for i in range(2)])
  single = advantages([episode(0)], baseline='leave_one_out')
  assert [g.dropped for g in (alike, mixed, broken, single)] == [
    'zero_advantage',
    '',
    'masked',
    'zero_advantage',
  ]
  summary = rewards.summary([alike, mixed, broken])
  assert summary['groups_zero_advantage'] == summary['groups_masked'] == 1
  assert (summary['trajectories'], summary['trajectories_masked']) == (11, 2)
  # a verdict of 0.1 is partial credit, no success
  assert summary['success'] == pytest.approx((7 * (success == 1) + 1) / 9)
  assert len(rewards.by_session([alike, broken])) == 7
  assert math.isnan(rewards.summary([broken])['success'])  # not a success rate of 0


def test_process_difference_is_not_dropped():
  """Equal outcomes with one format error have a non-zero advantage."""
  credit = advantages([episode(0), episode(1, statuses=('unclosed_block',))])
  assert credit.dropped == ''
  assert credit.credits[0].advantages[0] > 0 > credit.credits[1].advantages[0]
  assert advantages([episode(0), episode(1)], alpha=0.0).dropped == 'zero_advantage'


def test_thinking_bonus():
  """Paid for each turn with thinking, except malformed ones."""

  def said(reasoning):
    return {'role': 'assistant', 'content': '', 'reasoning_content': reasoning}

  messages = ({'role': 'user'}, said('so'), {'role': 'tool'}, said(' '), said('hm'))
  trajectory, completions = episode(
    0, statuses=('ok', 'ok', 'unclosed_block'), messages=messages
  )
  config = RewardConfig(thinking_bonus=0.5)
  got = rewards.process_rewards(trajectory, completions, config)
  np.testing.assert_array_equal(got, [0.5, 0.0, -1.0])
  # No bonus if turns and messages do not correspond.
  got = rewards.process_rewards(trajectory, completions[:2], config)
  np.testing.assert_array_equal(got, [0.0, 0.0])


def test_turns_without_an_act():
  """Cancelled and empty completions get no credit; an episode without any others still
  counts.

  The order of turns is the recorded one, independent of the order of the completions.
  """
  cancelled = episode(0, 1.0, ('ok', 'unclosed_block'))
  cancelled[1][1] = dataclasses.replace(cancelled[1][1], finish_reason='cancelled')
  silent = episode(1, 0.0, ())
  credit = advantages([cancelled, silent, episode(2, 0.0, tokens=0)])
  assert [len(c.completions) for c in credit.credits] == [1, 0, 0]
  assert credit.credits[0].reward.process == 0.0
  assert credit.credits[0].advantages[0] == pytest.approx(1 - 1 / 3)
  turns = episode(0, 1.0, ('invalid_json', 'ok', 'ok'))
  a = advantages([turns, silent], gamma=0.5)
  b = advantages([(turns[0], turns[1][::-1]), silent], gamma=0.5)
  np.testing.assert_array_equal(a.credits[0].advantages, b.credits[0].advantages)


def sampled(id_, prompt, parent=None, **fields):
  _, (c,) = episode(0)
  turn = fields.pop('turn', int(id_[1:] or 0))
  return dataclasses.replace(
    c, id=id_, turn=turn, prompt_ids=prompt, parent=parent, **fields
  )


def used(*completions):
  return ' '.join(c.id for c in rewards.acted(completions))


def test_repetitions_that_were_not_used():
  """Each way in which an agent repeats a request, and the completion it acted on."""
  # The answer was lost with the connection; the client repeated the request.
  first = sampled('a0', (1,)), sampled('b1', (1,), fork_reason='resampled')
  assert used(*first, sampled('c2', (1, 4, 2), 'b1')) == 'b1 c2'
  # The same at a later turn, whose prompt extends one completion both times.
  later = sampled('a0', (1,)), sampled('b1', (1, 4), 'a0'), sampled('c2', (1, 4), 'a0')
  assert used(*later, sampled('d3', (1, 4, 5), 'c2')) == 'a0 c2 d3'
  assert used(*later) == 'a0 c2'  # and at the last turn
  # The lost answer was recorded after the second request, and the clock stepped back.
  late = (
    sampled('a2', (1,), request=0, started_s=5000.0),
    sampled('b1', (1,), request=1, started_s=1400.0),
  )
  assert used(*late) == 'b1'
  # Best of three: the agent continues the first.
  three = [sampled(f'a{i}', (1,)) for i in range(3)]
  assert used(*three, sampled('b3', (1, 4), 'a0')) == 'a0 b3'
  # An agent without memory asks the same again and again, and each answer is paid.
  assert used(*three) == 'a2'
  trained = rewards.acted(three, {'a0': 1.0, 'a1': 0.0, 'a2': 0.0})
  assert list(trained) == three
  # One was cancelled, but a request extended it: the agent had its text.
  gone_on = sampled('a0', (1,)), sampled('b1', (1,))
  lost = sampled('c2', (1, 4), 'a0', finish_reason='cancelled')
  assert used(*gone_on, lost) == 'a0'
  # Two branches, both continued.
  fork = sampled('a0', (1,)), sampled('b1', (1, 4), 'a0'), sampled('c2', (1,))
  assert used(*fork, sampled('d3', (1, 5), 'c2')) == 'a0 b1 c2 d3'


def test_what_only_looks_unused_is_trained():
  """No prompt extends their ids, but the agent acted on all of them."""
  reset = sampled('a0', (1,)), sampled('b1', (7, 1), fork_reason='history_rewritten')
  assert used(*reset) == 'a0 b1'
  agents = (
    sampled('a0', (1,)),
    sampled('b1', (8,), fork_reason='new_conversation'),  # sub-agents of one turn
    sampled('c2', (9,), fork_reason='new_conversation'),
    sampled('d3', (1, 4, 5), 'a0'),
  )
  assert used(*agents) == 'a0 b1 c2 d3'
  # Restarted with the same first request, and finished in one turn.
  again = sampled('a0', (1,)), sampled('b1', (1, 4), 'a0'), sampled('c2', (1,))
  assert used(*again) == 'a0 b1 c2'


def test_unused_completions_earn_nothing():
  """A malformed answer that was not delivered is not penalised, and is counted."""
  trajectory, _ = episode(0, 1.0)
  lost = sampled('a0', (1,), status='invalid_json'), sampled('b1', (1,))
  credit = advantages([(trajectory, lost), episode(1, 0.0)])
  assert [c.id for c in credit.credits[0].completions] == ['b1']
  assert credit.credits[0].reward.process == 0.0
  assert rewards.summary([credit])['completions_unused'] == 1


def test_baseline_per_turn():
  """Two successes, one with a malformed first turn. With a baseline per trajectory its
  good second turn is rewarded; per turn only the malformed one is penalised, by as much
  as the other's first turn is rewarded, and the rest is 0."""
  group = [
    episode(0, 1.0, ('invalid_json', 'ok', 'ok')),
    episode(1, 1.0, ('ok', 'ok')),
  ]
  over = {
    kind: [
      c.advantages for c in advantages(group, alpha=0.2, baseline_over=kind).credits
    ]
    for kind in rewards.BASELINE_OVERS
  }
  np.testing.assert_allclose(over['trajectory'][0], [-0.1, 0.1, 0.1])
  np.testing.assert_allclose(over['trajectory'][1], [0.1, 0.1])
  np.testing.assert_allclose(over['turn'][0], [-0.1, 0.0, 0.0], atol=1e-12)
  np.testing.assert_allclose(over['turn'][1], [0.1, 0.0], atol=1e-12)
  alone = advantages(
    group, alpha=0.2, baseline='leave_one_out', baseline_over='turn'
  ).credits
  np.testing.assert_allclose(alone[0].advantages, [-0.2, 0.0, 0.0], atol=1e-12)


@pytest.mark.parametrize('over', rewards.BASELINE_OVERS)
@pytest.mark.parametrize('baseline', ['mean', 'leave_one_out'])
def test_a_group_of_one(over, baseline):
  """If all others are infrastructure failures there is nothing to compare with:
  advantage 0 at every turn, also after a malformed one."""
  group = [
    episode(0, 1.0, ('invalid_json', 'ok')),
    episode(1, end_reason='infrastructure'),
  ]
  credit = advantages(group, baseline=baseline, baseline_over=over)
  assert credit.credits[0].advantages.tolist() == [0.0, 0.0]
  assert credit.dropped == 'zero_advantage'


@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('gamma', 1.5),
    ('format_penalty', 1.0),
    ('thinking_bonus', -1.0),
    ('speed', 'fast'),
    ('speed_unit', 'days'),
    ('speed_baseline', 0.0),
    ('success_threshold', 0.0),
    ('baseline', 'median'),
    ('baseline_over', 'token'),
    ('normalise', True),
  ],
)
def test_config_names_the_field(field, value):
  """Law 9: the error of a bad config names the field and its valid values."""
  with pytest.raises(ValueError, match=f'RewardConfig.{field}'):
    RewardConfig(**{field: value})


def test_share_of_parallel_calls():
  """Calls of turns with several of them over all calls; None if there are none."""

  def with_calls(*by_turn):
    replies = [{'role': 'assistant', 'tool_calls': [{}] * n} for n in by_turn]
    trajectory, _ = episode(0, 1.0, ('ok',))
    return dataclasses.replace(trajectory, messages=tuple(replies))

  assert with_calls(3, 1, 0).parallel_calls == (3, 4)
  share = rewards.parallel_share([with_calls(3, 1), with_calls(1, 1), with_calls()])
  assert share == 0.5
  assert rewards.parallel_share([with_calls(0)]) is None
  assert rewards.parallel_share([]) is None
