"""ConfigDict → dataclasses: every mistake names its place."""

import dataclasses

import pytest

from experiments import common


@dataclasses.dataclass(frozen=True)
class Inner:
  size: int

  def __post_init__(self):
    if self.size < 1:
      raise ValueError(f'Inner.size={self.size}: must be positive')


@dataclasses.dataclass(frozen=True)
class Outer:
  inner: Inner
  maybe: Inner | None = None
  names: tuple[str, ...] = ()


def test_build_nested():
  """Nested dataclasses, absent ones and lists arrive as the code below wants them."""
  built = common.build(
    Outer, {'inner': {'size': 1}, 'maybe': {'size': 2}, 'names': ['a']}
  )
  assert built == Outer(Inner(1), Inner(2), ('a',))
  assert common.build(Outer, {'inner': {'size': 1}, 'maybe': None}).maybe is None


@pytest.mark.parametrize(
  ('values', 'message'),
  [
    ({'inner': {'size': 1}, 'other': 1}, 'config: Outer has no field other'),
    ({'inner': {'size': 1, 'x': 2}}, 'config.inner: Inner has no field x; it has size'),
    ({'inner': {}}, 'config.inner: Inner needs size'),
    ({'inner': {'size': 0}}, 'config.inner: Inner.size=0: must be positive'),
    ({'inner': {'size': 'a'}}, 'config.inner: '),
  ],
)
def test_build_refuses(values, message):
  """Unknown, missing and bad fields, each with the dotted path to it."""
  with pytest.raises(common.BadInput, match='^' + message.replace('.', r'\.')):
    common.build(Outer, values)
