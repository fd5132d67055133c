"""The stages before and after the verifier: seeds, draws, statements, difficulty."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
import random
import subprocess
from pathlib import Path

import pytest

from m2jax import sandbox
from m2jax.tasks.harbor import compose
from m2jax_pipelines import installed, llm, make
from m2jax_pipelines import terminal_gym as gym
from m2jax_pipelines.context import Context
from m2jax_pipelines.source import Tasks
from m2jax_pipelines.terminal_gym import drafts, grade, seeds, solvers, statements
from m2jax_pipelines.terminal_gym.drawn import NOTES, Degenerate, Family
from m2jax_pipelines.terminal_gym.families import FAMILIES
from tests.pipelines.model_server import Server

SOURCE = installed.Source('package', '1.2', 'a' * 64, 'GFDL')
_SCRIPTED = llm.LLMConfig()
SEED = seeds.Seed('document/0', 'title', 'text', (), SOURCE, 'A')


def drawn(family: Family, start: int = 0):
  """The first draw that makes a task."""
  for number in range(start, start + 50):
    try:
      return family.draw(random.Random(number))
    except Degenerate:
      continue
  raise AssertionError(f'{family.name}: no draw of 50 makes a task')


def context(tmp_path, config=_SCRIPTED) -> Context:
  (tmp_path / 'tasks').mkdir(exist_ok=True)
  return Context(tmp_path, llm.LLMClient(config, 'author'))


def one_document(manual: Path, patch: pytest.MonkeyPatch) -> seeds.Document:
  """Writes a document of questions, which takes the place of Debian's."""
  text = (
    '.SH EXAMPLES\n.SS List large files\nThese are files of a size above a limit, '
    'counted and sorted.\n.nf\n.B $ find /tmp -size +2M | sort\n.fi\n'
    '.SS Send mail\nNothing here is about a terminal: a window of a browser, with a '
    'mouse, and its keyboard.\n.SS Short\nToo short.\n.SH BUGS\nNone.\n'
  )
  manual.write_bytes(gzip.compress(text.encode()))
  patch.setattr(installed, 'debian', lambda *given: (manual, SOURCE))
  document = seeds.Document('find.1', 'findutils', 'find.1.gz', seeds.manual)
  patch.setattr(seeds, 'DOCUMENTS', (document,))
  return document


@pytest.fixture
def documents(tmp_path, monkeypatch):
  return one_document(tmp_path / 'find.1.gz', monkeypatch)


def test_rules_keep_questions_about_a_terminal(documents, tmp_path):
  kept, counts = seeds.load(documents, tmp_path)
  assert [seed.commands for seed in kept] == [('find /tmp -size +2M | sort',)]
  assert kept[0].tier == 'A'
  assert counts['items'] == 4  # a part before the first heading included
  assert seeds.matching(FAMILIES['find_size'], kept) == kept
  assert not seeds.matching(FAMILIES['join'], kept)
  facts = kept[0].facts()
  assert facts['sha256'] == SOURCE.sha256 and facts['license'] == 'GFDL'
  assert kept[0].text not in json.dumps(facts)  # texts of sources are not stored


def test_questions_of_every_format(tmp_path):
  (tmp_path / 'perlfaq4.pod').write_text('=head2 How do I C<sort>?\n\nSo.\n\n=cut\n')
  (tmp_path / 'x.rst.txt').write_text('How?\n----\n\nSo.\n')
  (tmp_path / 'f.txt.gz').write_bytes(gzip.compress('8.4.\xa0 How?\nSo.\n'.encode()))
  node = '\x1f\nFile: a.info,  Node: cut,  Up: x\n\n1 cut\nSo.\n'
  (tmp_path / 'a.info.gz').write_bytes(gzip.compress(node.encode()))
  assert [t for t, _ in seeds.pod(tmp_path)] == ['How do I sort?']
  assert list(seeds.rst(tmp_path)) == [('How?', '\nSo.\n')]
  assert [x.strip() for _, x in seeds.numbered(tmp_path / 'f.txt.gz')] == ['So.']
  assert list(seeds.info(tmp_path / 'a.info.gz')) == [('cut', '1 cut\nSo.\n')]


@pytest.mark.parametrize('family', FAMILIES.values(), ids=lambda f: f.name)
def test_draws_are_of_the_seed_and_differ(family):
  one, same, other = drawn(family), drawn(family), drawn(family, 60)
  assert one == same
  assert one.files != other.files
  # Statements at all depths tell what their solver needs; evolved ones tell less.
  texts = [statements.scripted(one, depth) for depth in range(4)]
  assert [statements.problem(one, d, t) for d, t in enumerate(texts)] == [''] * 4
  assert len(set(texts)) == 4 and NOTES in texts[3]
  for slot in one.indirect:
    assert one.values[slot] in texts[0] and one.values[slot] not in texts[2]


def test_variants_share_tests_and_solution():
  one = drawn(FAMILIES['counts'])
  made = [
    drafts.draft(
      FAMILIES['counts'], SEED, one, statements.scripted(one, d), f't{d}', {}
    )
    for d in range(4)
  ]
  assert len({d.instruction for d in made}) == 4
  for other in made[1:]:
    assert (other.tests, other.solution) == (made[0].tests, made[0].solution)
    assert other.overlay == made[0].overlay


@pytest.mark.parametrize(
  'compare, wanted, found, same',
  [
    ('exact', 'a\n', 'a\n', True),
    ('exact', 'a\n', 'a', False),
    ('exact', 'a b\n', 'a  b\n', False),
    ('lines', 'a\nb\n', 'b\na\n', True),
    ('lines', 'a\nb\n', 'a\nb\nb\n', False),
    ('words', '2 a\n1 b\n', '  2 a\n  1 b\n\n', True),
    ('words', '2 a\n1 b\n', '1 b\n2 a\n', False),
    ('json', '[{"a": 1, "b": "x"}]', '[ {"b":"x","a":1} ]', True),
    ('json', '[{"a": 1}]', '[{"a": "1"}]', False),
    ('json', '[1]', '[true]', False),
    ('json', '[1]', '[1.0]', False),
    ('json', '[NaN]', '[NaN]', False),
    ('json', '{"a": 1}', '{"a": 2, "a": 1}', False),
    ('json', '[1]', '[' * 100_000, False),
    ('any', '', ' \n', False),
  ],
)
def test_results_are_compared_as_the_task_says(compare, wanted, found, same):
  assert grade.same(compare, wanted, found) is same


def test_harbor_judges_in_the_agents_container(tmp_path, monkeypatch):
  # Without the verifier's sandbox, test.sh lists the workspace and runs the program.
  one = drawn(FAMILIES['program_totals'])
  tests, tree = tmp_path / 'tests', tmp_path / 'tree'
  compose.write(drafts.suite(one), tests)
  compose.write(one.workspace(), tree)
  monkeypatch.setattr(grade, 'TESTS', str(tests))
  expected = json.loads((tests / 'expected.json').read_text())

  def reward():
    listing, runs = grade.in_place(tree, expected)
    read = {p: (tree / p).read_bytes() for p in listing if (tree / p).is_file()}
    return grade.judge(expected, listing, read.get, runs)[0]

  assert reward() == 0
  subprocess.run(['bash', '-c', one.solution()], cwd=tree, check=True)
  assert reward() == 1


class Broken:
  """A family whose first draws fail in one of three ways."""

  def __init__(self, failures: int, way: str):
    self.left, self.way = failures, way

  def draw(self, rng):
    one = FAMILIES['dates'].draw(random.Random(3))
    if not self.left:
      return one
    self.left -= 1
    if self.way == 'draw':
      raise Degenerate('nothing to do')
    if self.way == 'setup':
      return dataclasses.replace(one, setup='chmod 600 missing\n')
    return dataclasses.replace(one, commands=('true',))


@pytest.mark.parametrize('way, said', [('draw', 'draw: nothing'), ('setup', 'setup.sh'),
                                       ('solution', 'the solution fails')])  # fmt: skip
def test_environments_are_repaired_up_to_a_limit(tmp_path, way, said):
  async def proved(failures: int):
    family = Family('dates', 'awk', (), Broken(failures, way).draw)
    try:
      return await gym.prove(
        gym.Config(repairs=1), context(tmp_path), family, SEED, 'dates/0'
      )
    finally:
      await sandbox.shutdown()

  try:
    good, bad = asyncio.run(proved(1)), asyncio.run(proved(2))
  except sandbox.SandboxUnavailable as error:
    pytest.skip(str(error))
  assert not good.problem and said in good.repairs[0]
  assert 'after 1 repairs' in bad.problem and said in bad.problem


def test_hidden_inputs_are_drawn_with_the_salt_of_a_dataset(tmp_path):
  """Who knows code and seed knows the workspace, and not what a program is tried on."""
  name = next(name for name, family in FAMILIES.items() if family.hide)

  async def proved(directory):
    (directory / 'tasks').mkdir(parents=True, exist_ok=True)
    try:
      return await gym.prove(
        gym.Config(), context(directory), FAMILIES[name], SEED, f'{name}/0'
      )
    finally:
      await sandbox.shutdown()

  try:
    one, other = (asyncio.run(proved(tmp_path / d)).drawn for d in 'ab')
    again = asyncio.run(proved(tmp_path / 'a')).drawn
  except sandbox.SandboxUnavailable as error:
    pytest.skip(str(error))
  assert one.files == other.files and one.values == other.values
  assert not {str(i) for i in one.inputs} & {str(i) for i in other.inputs}
  assert one == again


def test_a_models_statement_is_repaired_with_the_reason(tmp_path):
  one = drawn(FAMILIES['dates'])
  right = 'In other words: ' + statements.scripted(one, 0)
  with Server(
    lambda body: right if len(body['messages']) > 1 else 'Add it up.'
  ) as model:
    author = llm.LLMClient(llm.LLMConfig(model.url, 'writer'), 'author')
    told = asyncio.run(statements.write(author, one, 0, 1))
    assert (told.text, told.by, told.problem) == (right, 'writer', '')
    assert told.repairs[0] in model.bodies[1]['messages'][-1]['content']
    never = asyncio.run(statements.write(author, one, 3, 1))
  assert never.text == statements.scripted(one, 3) and never.by == llm.SCRIPTED
  assert len(never.repairs) == 2 and not never.problem


def test_an_outage_of_the_author_or_the_machine_is_no_rejection(tmp_path, monkeypatch):
  """The draw is tried again by the next run, which makes the same ids."""
  one = drawn(FAMILIES['dates'])
  proved = gym._Proved(one, ())

  async def evolved(prove):
    monkeypatch.setattr(gym, 'prove', prove)
    config, family = gym.Config(depths=2), FAMILIES['dates']
    stream = gym._evolved(config, asked, family, [SEED], 0)
    return [candidate async for candidate in stream]

  async def broken(*given):
    raise sandbox.SandboxError('the disk is gone')

  async def works(*given):
    return proved

  with Server(lambda body: 500) as model:
    asked = context(tmp_path, llm.LLMConfig(model.url, 'writer', retries=0))
    told = asyncio.run(evolved(works))
    assert [c.id for c in told] == ['dates/0', 'dates/0+1']
    assert all(c.invalid and 'HTTP 500' in c.reason for c in told)
    (failed,) = asyncio.run(evolved(broken))
  assert failed.invalid and failed.reason == 'the disk is gone'


def test_difficulty_follows_the_solvers():
  def rates(**more):
    return dict.fromkeys(('nothing', 'example', 'literal', 'noisy'), 0.0) | more

  assert solvers.bucket(rates(full=1.0)) == 'reference'
  assert solvers.bucket(rates(full=1.0, noisy=0.25)) == 'hard'
  assert solvers.bucket(rates(full=1.0, literal=1.0)) == 'medium'
  assert solvers.bucket(rates(full=1.0, literal=1.0, noisy=0.5)) == 'easy'
  assert solvers.bucket(dict.fromkeys(rates(full=1.0), 1.0)) == 'all'
  # The literal solver has what the statement tells, and nothing else.
  one = drawn(FAMILIES['dates'])
  for depth, known in (0, True), (2, False):
    found = dict(solvers.scripts(one, statements.scripted(one, depth), 2, 's'))
    assert (found['literal'] == found['full']) is known


def test_a_run_records_seeds_depths_and_difficulty(documents, tmp_path):
  config = gym.Config(count=3, families=('find_size', 'join'), depths=3, trials=1)
  try:
    summary = asyncio.run(make.run(config, tmp_path / 'set', show=False))
  except sandbox.SandboxUnavailable as error:
    pytest.skip(str(error))
  assert summary.tasks == 3
  lines = (tmp_path / 'set' / 'records.jsonl').read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  assert {r['id']: r['reason'] for r in rows if r['outcome'] == 'rejected'} == {
    'family/join': 'no seed matches'
  }
  tasks = sorted((r for r in rows if r['outcome'] == 'admitted'), key=lambda r: r['id'])
  assert [r['facts']['depth'] for r in tasks] == [0, 1, 2]
  assert [r['facts']['parent'] for r in tasks] == ['', tasks[0]['id'], tasks[1]['id']]
  assert [r['facts']['rates']['literal'] for r in tasks] == [1, 1, 0]
  assert all(r['facts']['seed'] == 'find.1/1' for r in tasks)
  assert len(list(Tasks(tmp_path / 'set'))) == 3


@pytest.mark.long
def test_solutions_of_every_family_pass(tmp_path):
  async def proved():
    try:
      for name, family in FAMILIES.items():
        one = await gym.prove(gym.Config(), context(tmp_path), family, SEED, 'own/7')
        yield name, one.problem
    finally:
      await sandbox.shutdown()

  async def all_of_them():
    return {name: problem async for name, problem in proved()}

  assert asyncio.run(all_of_them()) == dict.fromkeys(FAMILIES, '')
