"""The mixture's rule: shares, cap, floors and diversity, as properties."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2jax.data import mixture
from m2jax.data.mixture import MixtureConfig


@st.composite
def collections(draw):
  """Sizes, domains, categories, qualities, weights of some documents."""
  n = draw(st.integers(1, 30))
  domains = draw(st.integers(1, 4))

  def column(elements):
    return np.array(draw(st.lists(elements, min_size=n, max_size=n)))

  weights = draw(st.lists(st.floats(0.01, 10), min_size=domains, max_size=domains))
  return (
    column(st.integers(1, 1000)),
    column(st.integers(0, domains - 1)),
    column(st.integers(0, 4)),
    column(st.floats(0.1, 10)),
    weights,
  )


@st.composite
def configs(draw):
  cap = draw(st.floats(0.5, 8))
  epoch = draw(st.floats(0.05, 1)) * cap
  return MixtureConfig(cap=cap, floor=draw(st.floats(0, 1)), epoch=epoch)


@settings(max_examples=200)
@given(collections(), configs())
def test_the_rule_holds(collection, config):
  """The epoch has its size; no document comes more often than the cap; every category
  has its floor; within domain and category, better documents come at least as often."""
  sizes, domains, categories, qualities, weights = collection
  found = mixture.repetitions(*collection, config)
  assert np.all(found >= 0) and np.all(found <= config.cap * (1 + 1e-9))
  total = config.epoch * sizes.sum()
  assert np.sum(sizes * found) == pytest.approx(total)
  for category in np.unique(categories):
    mine = categories == category
    floor = config.floor * config.epoch * sizes[mine].sum()
    assert np.sum((sizes * found)[mine]) >= floor * (1 - 1e-6)
    for domain in np.unique(domains[mine]):
      group = mine & (domains == domain)
      ordered = found[group][np.argsort(qualities[group], kind='stable')]
      assert np.all(np.diff(ordered) >= -1e-9)


@settings(max_examples=100)
@given(collections(), st.floats(0.1, 2))
def test_shares_without_limits(collection, epoch):
  """Where no cap or floor binds, domains have exactly the share of their weights, and
  documents of a domain come in proportion to their quality."""
  sizes, domains, categories, qualities, weights = collection
  config = MixtureConfig(cap=1e9, floor=0.0, epoch=epoch)
  found = mixture.repetitions(*collection, config)
  used = np.unique(domains)
  for domain in used:
    mine = domains == domain
    share = weights[domain] / sum(weights[d] for d in used)
    got = np.sum((sizes * found)[mine]) / np.sum(sizes * found)
    assert got == pytest.approx(share)
    ratio = found[mine] / qualities[mine]
    np.testing.assert_allclose(ratio, ratio[0])


def test_hand_computed():
  """Two domains of equal weight, the second small and good: up-sampled to its cap; what
  that leaves goes to the first. A floor then lifts the category that lost."""
  sizes, domains = [100, 100, 50], [0, 0, 1]
  config = MixtureConfig(cap=2.0, floor=0.0)
  found = mixture.repetitions(sizes, domains, [0, 0, 0], [1, 3, 1], [1, 1], config)
  # 250 in all: 100 for the small one at its cap, 150 as 1 : 3 for the others
  np.testing.assert_allclose(found, [0.375, 1.125, 2.0])
  config = MixtureConfig(cap=2.0, floor=0.6)
  found = mixture.repetitions(sizes, domains, [0, 1, 1], [1, 3, 1], [1, 1], config)
  # category 0: 37.5 of its natural 100, so 60; 190 are left: 100 at the cap, 90
  np.testing.assert_allclose(found, [0.6, 0.9, 2.0])


def test_a_domain_without_weight_is_left_out():
  """Its size does not count for the epoch either."""
  config = MixtureConfig(floor=1.0)
  found = mixture.repetitions([5, 5], [0, 1], [0, 1], [1, 1], [1, 0], config)
  np.testing.assert_allclose(found, [1, 0])


@given(
  repetition=st.lists(st.floats(0, 5), min_size=1, max_size=40),
  groups=st.integers(1, 4),
  seed=st.integers(0, 2**63),
)
def test_counts(repetition, groups, seed):
  """Each document comes as often as its r, rounded down or up, and any run of a group's
  documents together as often as their sum, to within one."""
  repetition = np.array(repetition)
  key = np.arange(len(repetition)) % groups
  found = mixture.counts(repetition, key, seed)
  assert np.all((found == np.floor(repetition)) | (found == np.ceil(repetition)))
  for group in range(groups):
    r, n = repetition[key == group], found[key == group]
    for start in range(len(r)):
      gaps = np.cumsum(n[start:]) - np.cumsum(r[start:])
      assert np.all(np.abs(gaps) < 1 + 1e-6)


def test_counts_are_right_on_average():
  """Over seeds a document comes r times: the drawing favours none."""
  repetition = np.array([0.25, 1.5, 0.1, 3.0, 0.9])
  found = [mixture.counts(repetition, np.zeros(5), seed) for seed in range(4000)]
  np.testing.assert_allclose(np.mean(found, axis=0), repetition, atol=0.03)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=10))
def test_mixture_source(counts):
  """Indexing reaches each copy; other counts are other data."""
  source = [f'd{i}' for i in range(len(counts))]
  mixed = mixture.Mixture(source, counts)
  assert list(mixed) == list(np.repeat(source, counts))
  other = mixture.Mixture(source, [*counts[:-1], counts[-1] + 1])
  assert other.fingerprint != mixed.fingerprint


@pytest.mark.parametrize(
  ('fields', 'name'),
  [
    ({'cap': 0.0}, 'cap'),
    ({'floor': 1.5}, 'floor'),
    ({'gain': 0.5}, 'gain'),
    ({'epoch': 5.0}, 'epoch'),
  ],
)
def test_bad_fields_are_named(fields, name):
  """A broken config says which field and what it should be."""
  with pytest.raises(ValueError, match=f'MixtureConfig.{name}='):
    MixtureConfig(**fields)


def test_bad_numbers_are_refused():
  """They would give no mixture, or one of nothing."""
  config = MixtureConfig()
  with pytest.raises(ValueError, match='needs documents'):
    mixture.repetitions([], [], [], [], [1], config)
  with pytest.raises(ValueError, match='positive'):
    mixture.repetitions([0], [0], [0], [1], [1], config)
  with pytest.raises(ValueError, match='domain weights'):
    mixture.repetitions([1], [0], [0], [1], [0, 1], config)
  with pytest.raises(ValueError, match='2 counts for 1'):
    mixture.Mixture(['a'], [1, 1])
