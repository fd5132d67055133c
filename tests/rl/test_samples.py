"""From judged groups to loss terms: what is in the loss, with which weight."""

import jax.numpy as jnp
import numpy as np
import pytest

from m2jax import forest
from m2jax.records import Completion, Trajectory
from m2jax.rl import rewards, samples
from m2jax.rl.estimators import cispo


def episode(item, rank, success, turns=2, end_reason='answer'):
  """Turns that extend each other; each prompt ends with an observation of its own."""
  session, ids, out = f'{item}.{rank}', (1, 2, 3 + item), []
  for turn in range(turns):
    response = (10 + rank, 20 + turn, *range(30, 30 + rank))
    completion = Completion(
      id=f'{session}/{turn}',
      session=session,
      turn=turn,
      parent=None,
      fork_reason=None,
      prompt_ids=ids,
      response_ids=response,
      logprobs=tuple(-0.125 * (i + 1 + turn) for i in range(len(response))),
      versions=(turn,) * len(response),
      finish_reason='stop',
      status='ok',
    )
    out.append(completion)
    ids = ids + response + (90, 91)  # the observation
  return Trajectory(session, item, rank, 't', 'f', end_reason, success, 1.0, 1), out


def credit(item, successes, **kwargs):
  group = [episode(item, rank, s, **kwargs) for rank, s in enumerate(successes)]
  return rewards.advantages(group, rewards.RewardConfig())


def test_a_sample_is_a_completion():
  """Law 4: prompt and response exactly as recorded, one value per response token."""
  group = credit(0, (1.0, 0.0, 0.5))
  (got,) = samples.from_groups([group])
  want = [
    (c, a)
    for k in group.credits
    for c, a in zip(k.completions, k.advantages, strict=True)
  ]
  assert len(got) == len(want) == 6
  for sample, (completion, advantage) in zip(got, want, strict=True):
    want_ids = [*completion.prompt_ids, *completion.response_ids]
    assert sample.tokens.tolist() == want_ids
    assert sample.prompt_length == len(completion.prompt_ids)
    np.testing.assert_allclose(sample.old_logprobs, completion.logprobs)
    np.testing.assert_array_equal(sample.versions, completion.versions)
    np.testing.assert_allclose(sample.advantages, advantage)
    assert len(sample.advantages) == len(sample.weights) == len(completion.response_ids)


def test_what_is_left_out():
  """Dropped groups and masked trajectories are in neither terms nor normaliser."""
  kept = credit(0, (1.0, 0.0))
  dropped = credit(1, (1.0, 1.0))
  masked = episode(2, 2, 0.0, end_reason='infrastructure')
  broken = rewards.advantages(
    [episode(2, 0, 1.0), episode(2, 1, 0.0), masked], rewards.RewardConfig()
  )
  got = samples.from_groups([kept, dropped, broken])
  assert [len(group) for group in got] == [4, 4]
  # 'prompt': each of the two groups that are left has half of the weight.
  for group in got:
    assert sum(s.weights.sum() for s in group) == pytest.approx(0.5)
  tokens = samples.from_groups([kept, dropped, broken], normaliser='token')
  assert len({float(w) for group in tokens for s in group for w in s.weights}) == 1
  # 'trajectory': both turns of one share its weight.
  each = samples.from_groups([kept, dropped, broken], normaliser='trajectory')
  sums = [[s.weights.sum() for s in group] for group in each]
  for group in sums:
    np.testing.assert_allclose(np.add(group[::2], group[1::2]), [0.25, 0.25])
  assert samples.from_groups([dropped]) == []
  with pytest.raises(ValueError, match='1 weights for 2 trajectories'):
    samples.from_group(kept, [1.0])


def test_loss_does_not_depend_on_rows():
  """The loss equals the per-prompt sum computed by hand, for every packing (law 3).

  Observations between the turns are prompt tokens: they are neither in the numerator
  nor in Σ|o_i|.
  """
  groups = [credit(0, (1.0, 0.0, 0.0)), credit(1, (0.0, 1.0), turns=3)]
  batch = sum(samples.from_groups(groups), [])
  rng = np.random.default_rng(0)
  logprobs = [s.old_logprobs + rng.normal(size=len(s.weights)) for s in batch]

  by_hand, i = 0.0, 0
  for group in groups:
    numerator = denominator = 0.0
    for k in group.credits:
      for completion, advantage in zip(k.completions, k.advantages, strict=True):
        ratio = np.minimum(np.exp(logprobs[i] - np.array(completion.logprobs)), 5.0)
        numerator += np.sum(ratio * advantage * logprobs[i])
        denominator += len(completion.response_ids)
        i += 1
    by_hand -= numerator / denominator / len(groups)

  table = np.zeros((len(batch), max(map(len, logprobs))))
  for row, values in zip(table, logprobs, strict=True):
    row[: len(values)] = values
  longest = max(len(s.tokens) for s in batch)
  for row_tokens in (longest, 2 * longest, 500):
    for order in (np.arange(len(batch)), rng.permutation(len(batch))):
      rows = forest.merge([batch[i] for i in order], row_tokens=row_tokens)
      logprob = jnp.asarray(table[order][rows.term_sample, rows.term_offset])
      terms = cispo.loss(logprob, rows.old_logprob, rows.advantage, rows.weight)
      assert float(terms.sum()) == pytest.approx(by_hand, rel=1e-5)


def test_float32_weights_keep_the_normaliser():
  """Casting weights to float32 does not move the normaliser."""
  groups = [credit(i, (1.0, 0.0), turns=1 + i) for i in range(7)]
  weights = [s.weights for group in samples.from_groups(groups) for s in group]
  assert all(w.dtype == np.float32 for w in weights)
  assert np.concatenate(weights).sum(dtype=np.float64) == pytest.approx(1.0, rel=1e-6)
