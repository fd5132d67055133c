"""Deep search: questions have one answer, tools solve them, shortcuts do not."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from m2jax.tasks import harbor
from m2jax_pipelines import deep_search, installed, llm
from m2jax_pipelines.context import Context
from m2jax_pipelines.deep_search import corpora, grade, library, questions

pytest.importorskip('bm25s', reason='pip install -e ./m2jax_pipelines')

WORDS = [f'{a}{b}' for a in 'bcdfghklmn' for b in ('andle', 'imber', 'urnis', 'ollow')]

RARE = [f'rare{a}{b}' for a in 'abcdefghi' for b in 'qrstuvwxyz']  # each in ~4 passages


def corpus(passages: int = 120) -> corpora.Corpus:
  """Passages of drawn words that link to each other; each has a word of few others."""
  rng = random.Random(0)
  raw = []
  for i in range(passages):
    rare = rng.sample(RARE, 3)
    words = ' '.join(rng.sample(WORDS, 9) + rare)
    links = [f'Title{j}' for j in rng.sample(range(passages), 5)]
    text = f'Title{i}\n\nHere {words} together. Also see more.'
    raw.append(((f'Title{i}',), (), text, links))
  source = installed.Source('toy', '1', '0' * 64, 'Apache-2.0')
  return corpora.build('toy', 'a toy', raw, source, fold=False)


@pytest.fixture(scope='module')
def graph(tmp_path_factory):
  found = corpus()
  root = tmp_path_factory.mktemp('library')
  library.save(deep_search.rows(found), str(root / 'library'))
  ranker = library.Ranker(str(root / 'library'), list(found.passages))
  return questions.Graph(found, ranker), root


def _chain(graph, hops, seed=0):
  rng = random.Random(seed)
  drawn = (graph.chain(hops, rng) for _ in range(3000))
  return next(question for question in drawn if question)


@pytest.mark.parametrize('hops', [2, 3, 4])
def test_every_step_of_a_chain_has_one_result(graph, hops):
  """By the corpus alone, without the code that drew the question."""
  found, _ = graph
  for seed in range(5):
    question = _chain(found, hops, seed)
    assert len(question.path) == hops
    passages = found.corpus.passages
    for before, word, after in zip(
      question.path, question.words, question.path[1:], strict=False
    ):
      mention = [
        link
        for link in passages[before].links
        if word in (passages[link].title + passages[link].text).lower()
      ]
      assert mention == [after]


def test_a_sentence_of_two_passages_is_no_clue(graph):
  """Packages of one source have the same description: its clue fits all of them."""
  found, _ = graph
  passage = next(iter(found.corpus.passages.values()))
  clue = found.clue(passage, random.Random(0))
  assert clue and found._only(passage.id, clue)
  copy = {**found._words, 'copy': found._words[passage.id]}
  twin = questions.Graph(found.corpus, found._ranker)
  twin._words = copy
  assert twin.clue(passage, random.Random(0)) == ''


def test_a_clue_names_nothing():
  sentence = 'FooBar was written at {MIT} by Jane Doe in 1984 with ``x``, as foobar is.'
  clue = questions.obscured(sentence, ('FooBar', 'FB'))
  for name in ('foobar', 'mit', 'jane', 'doe', '1984', 'x'):
    assert name not in clue.lower().split()
  assert 'written' in clue


def test_the_tools_solve_it(graph, tmp_path):
  """The scripted solver reads only what the tools print."""
  found, root = graph
  question = _chain(found, 3)
  (tmp_path / 'library').symlink_to(root / 'library')
  here = Path(deep_search.__file__).parent
  (tmp_path / 'library.py').write_text((here / 'library.py').read_text())
  plan = {'starts': question.starts, 'words': question.words}
  (tmp_path / 'plan.json').write_text(json.dumps(plan))
  (tmp_path / 'solve.py').write_text((here / 'solve.py').read_text())
  subprocess.run(
    [sys.executable, 'solve.py'],
    cwd=tmp_path,
    check=True,
    env={**os.environ, 'M2JAX_WORKSPACE': str(tmp_path)},
  )
  data = (tmp_path / 'answer.json').read_bytes()
  assert grade.judge(data, _expected(question))[0] == 1


def _expected(question):
  return {'answers': question.answers, 'evidence': question.path, 'slack': 1}


EXPECTED = {'answers': ['Right One', 'RO'], 'evidence': ['t-1', 't-2'], 'slack': 1}


def _json(answer='Right One', evidence=('t-1', 't-2')):
  return json.dumps({'answer': answer, 'evidence': evidence}).encode()


@pytest.mark.parametrize(
  'data',
  [
    _json(),
    _json('right  one.'),
    _json('"RO"'),
    _json(evidence=['t-2', 't-1', 't-9']),
    _json(evidence=['t-1', 't-1', 't-1', 't-2']),
  ],
)
def test_right_answers_pass(data):
  assert grade.judge(data, EXPECTED)[0] == 1


@pytest.mark.parametrize(
  'data',
  [
    None,
    b'',
    b'Right One t-1 t-2',
    _json(evidence=[]),  # a guess
    _json(evidence=['t-2']),  # only where the answer is
    _json(evidence=[f't-{i}' for i in range(500)]),  # everything
    _json(evidence=['t-1', 't-2', 't-3', 't-4']),
    _json('Right One, Wrong One'),  # several answers
    _json(['Right One', 'Wrong One']),
    _json({'Right One': 1}),
    _json(True),
    _json(None),
    _json(''),
    _json('*'),
    _json('.*'),
    _json('Right One' + ' ' * 400),
    _json(evidence='t-1 t-2'),
    _json(evidence=[['t-1'], ['t-2']]),
    _json(evidence={'t-1': 1, 't-2': 1}),
    _json(evidence=['T-1', 'T-2']),
    _json(evidence=['t-*']),
    _json() + b' {}',
    b'[' * 10000,
    b'{"answer": "Right One", "evidence": ["t-1", "t-2"], "x": "'
    + b'a' * 20000
    + b'"}',
    b'\xff\xfe' + _json(),
    b'{"answer": "Wrong", "answer": "Right One", "evidence": ["t-1", "t-2"]}',
    b'{"answer": "Right One", "evidence": ["x"], "evidence": ["t-1", "t-2"]}',
    _json()[:-1] + b', "answers": ["Right One", "Wrong One"]}',
    b'[' + _json() + b', ' + _json('Wrong One') + b']',
    _json('R\u0456ght One'),  # a Cyrillic letter
    _json('Right\u200b One'),
    _json('Right One\nWrong One'),
    _json('Right One / RO'),
    _json('not Wrong One'),
    _json('the answer is Right One'),
    _json('Right_One'),
    _json(evidence=['t-1 ', 't-2']),
    _json(evidence=['t\u20111', 't\u20112']),  # another hyphen
    _json(evidence=['t-1', 't-2', *(f'x{i}' for i in range(2))]),  # padding
    _json(evidence=['t-1,t-2']),
    _json(evidence=['../t-1', '../t-2']),
    _json(evidence=['t-1', None]),
    _json(evidence=[1, 2]),
    b'\xef\xbb\xbf' + _json(),
    b"{'answer': 'Right One', 'evidence': ['t-1', 't-2']}",
  ],
)
def test_an_attempt_to_game_it_fails(data):
  assert grade.judge(data, EXPECTED)[0] == 0


_LEFT = {  # what an agent leaves in its workspace
  'nothing': ':',
  'a link to what is expected': 'ln -s ../tests/expected.json answer.json',
  'a link to a copy': 'echo {} > a; ln a b; ln -s b answer.json',
  'a directory': 'mkdir answer.json',
  'a pipe': 'mkfifo answer.json',
  'a reward': 'mkdir -p logs; echo 1 > logs/reward.txt; echo 1 > reward.txt',
  'a verifier': 'mkdir tests; echo "echo 1 > $M2JAX_LOGS/reward.txt" > tests/test.sh',
  'forged output of a tool': 'echo "t-1\tRight One" > library.out; echo submitted',
  'modules': 'echo "raise SystemExit" | tee json.py re.py sitecustomize.py',
  'large': 'head -c 1000000 /dev/zero > answer.json',
}


def _outcomes(tmp_path, commands, source=None):
  """Outcomes of an agent's commands, by the verifier or a changed source of it."""
  here = Path(deep_search.__file__).parent
  draft = harbor.Draft(
    'toy',
    'x',
    harbor.Metadata('deep_search', 'chain-2', collect=('answer.json',)),
    tests={
      'test.sh': deep_search._TEST.encode(),
      'grade.py': (source or (here / 'grade.py').read_text()).encode(),
      'expected.json': json.dumps(EXPECTED).encode(),
    },
    solution={'solve.sh': b':'},
  )
  path = harbor.write(draft, tmp_path / 'tasks' / 'train')
  task = harbor.of_directory(harbor.read(path))

  async def attempt(command):
    async with task.open() as environment:
      await environment.box.exec(command)
      return (await task.judge(environment)).outcome

  async def all_():
    return await asyncio.gather(*map(attempt, commands))

  return asyncio.run(all_())


def test_what_is_left_beside_an_answer_is_not_judged(tmp_path):
  found = dict(zip(_LEFT, _outcomes(tmp_path, _LEFT.values()), strict=True))
  assert found == dict.fromkeys(_LEFT, harbor.FAILED)


@pytest.mark.parametrize(
  'before, outcome',
  [('expected = json.load(file)', 'invalid'), ('data = file.read(', 'failed')],
)
def test_a_verifier_that_is_killed_before_it_reads_an_answer_is_invalid(
  tmp_path, before, outcome
):
  """As for want of memory; from there on it may be the answer that does it."""
  source = Path(grade.__file__).read_text()
  assert source.count(before) == 1
  killed = source.replace(before, f'os.kill(os.getpid(), 9); {before}')
  command = f"echo '{_json().decode()}' > answer.json"
  assert _outcomes(tmp_path, [command], killed) == [outcome]


def test_one_search_is_not_enough(graph):
  """A question whose answer the first hit of a search is has no draft."""
  found, _ = graph
  question = _chain(found, 2)
  lazy = list(found.lazy(question, questions.text(question, 'a toy')))
  assert lazy and question.path[0] in lazy  # the clue leads to the first passage
  config = deep_search.Config()
  context = Context(Path('/'), llm.LLMClient(config.author, 'author'))
  for number in range(12):
    made = asyncio.run(
      deep_search._candidate(config, context, found, None, 'toy', number)
    )
    if made.draft is not None:
      expected = json.loads(made.draft.tests['expected.json'])
      hits = found._ranker.search(made.text, 1)
      assert expected['evidence'][-1] not in hits


def test_a_rewritten_question_may_not_tell_the_answer(graph):
  question = _chain(graph[0], 3)
  text = questions.text(question, 'a toy')
  assert deep_search._keeps(text, question)
  assert not deep_search._keeps(text + question.answers[0], question)
  assert not deep_search._keeps(text.replace(f'"{question.words[0]}"', 'it'), question)
  # A meeting has no words, and what cannot be searched for is no question.
  meeting = dataclasses.replace(question, words=())
  assert deep_search._keeps(text, meeting)
  assert not deep_search._keeps('Which passage do both of them link to?', meeting)
