"""The second verifier agrees with a right task, and sees one whose tests are wrong."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from benchmarks import second_verifier_terminal as second
from m2jax import sandbox
from m2jax.tasks import harbor
from m2jax_pipelines import installed
from m2jax_pipelines.terminal_gym import drafts, seeds, statements
from m2jax_pipelines.terminal_gym.drawn import Degenerate
from m2jax_pipelines.terminal_gym.families import FAMILIES

SOURCE = installed.Source('nothing', '1', '0', 'none')
SEED = seeds.Seed('nothing/0', 'title', 'text', (), SOURCE, 'A')


def check(*paths) -> list[list[str]]:
  """What the second verifier finds of each; three are looked at at a time."""
  several = asyncio.Semaphore(3)

  async def one(path):
    async with several:
      return await second.check(path, 0)

  async def run():
    try:
      return await asyncio.gather(*map(one, paths))
    finally:
      await sandbox.shutdown()

  try:
    return asyncio.run(run())
  except sandbox.SandboxUnavailable as error:
    pytest.skip(str(error))


def written(family: str, place):
  for number in range(50):
    try:
      one = FAMILIES[family].draw(random.Random(number))
      break
    except Degenerate:
      continue
  text = statements.scripted(one, 0)
  draft = drafts.draft(FAMILIES[family], SEED, one, text, family, {})
  return harbor.write(draft, place / 'tasks' / 'train')


def test_a_wrong_test_is_a_disagreement(tmp_path):
  path = written('join', tmp_path)
  assert check(path) == [[]]
  file = path / 'tests' / 'expected.json'
  expected = json.loads(file.read_text())
  entry = next(e for e in expected['entries'].values() if not e.get('given'))
  entry['text'] = entry['text'].rpartition('\n')[0].rpartition('\n')[0] + '\n'
  file.write_text(json.dumps(expected))
  assert any(reason.startswith('the solution') for reason in check(path)[0])


def test_every_family_has_a_derivation():
  assert {*second.DERIVED, *second.PROGRAMS} == set(FAMILIES)


@pytest.mark.long
def test_families_agree(tmp_path):
  found = check(*(written(family, tmp_path) for family in FAMILIES))
  assert dict(zip(FAMILIES, found, strict=True)) == {family: [] for family in FAMILIES}
