"""Terminal tasks: reproducible, disjoint between splits, short, correctly judged."""

import dataclasses
import itertools
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from m2jax.tasks import terminal
from m2jax.tasks.terminal import corpus, steps
from tests.tasks.local_shell import IN_MEMORY, put

FAMILIES = sorted(terminal.FAMILIES)


def some(family, count, split='train', seed=0, **settings):
  config = terminal.TerminalConfig(**settings)
  specs = (terminal.spec(split, i, seed, config, family) for i in range(count))
  return [terminal.make(spec) for spec in specs]


def judge(task, files, answer):
  with tempfile.TemporaryDirectory(dir=IN_MEMORY) as directory:
    put(Path(directory), files)
    return task.expected(Path(directory), answer)


_DIGEST = """
import hashlib
from m2jax.tasks import terminal
digest = hashlib.sha256()
for split in terminal.SPLITS:
  for i in range(60):
    task = terminal.make(terminal.spec(split, i, 3))
    for part in (task.spec, task.instruction, sorted(task.files.items()),
                 sorted(task.expected.files.items()), task.expected.answer):
      digest.update(repr(part).encode())
print(digest.hexdigest())
"""


def test_same_tasks_in_every_process():
  """A restart and every host rebuild a task from its spec, whatever the hash seed."""
  digests = {
    subprocess.run(
      [sys.executable, '-c', _DIGEST],
      env=os.environ
      | {'PYTHONHASHSEED': seed, 'PYTHONPATH': os.pathsep.join(sys.path)},
      capture_output=True,
      text=True,
      check=True,
    ).stdout
    for seed in ('1', '2')
  }
  assert len(digests) == 1 and digests.pop().strip()


def test_streams_differ_by_seed_and_index():
  """Otherwise the SFT set, the RL stream and the evaluation would be the same tasks."""
  tasks = [
    terminal.make(terminal.spec('train', i, seed))
    for seed in (0, 1)
    for i in range(100)
  ]
  assert len({(task.instruction, *task.files.values()) for task in tasks}) == len(tasks)


def _leaves(value, key=''):
  """The values in nested dicts and lists as text, except the sentences of steps."""
  if isinstance(value, dict):
    for name, item in value.items():
      yield from _leaves(item, name)
  elif isinstance(value, list | tuple):
    for item in value:
      yield from _leaves(item)
  elif key not in ('verb', 'by', 'ask'):
    yield str(value)


def _words(task):
  """The words of a task, also file stems."""
  words = {name.partition('.')[0].lower() for name in task.files}
  for value in _leaves(task.params):
    words.update(re.findall(r'\w+', value.lower().partition('.')[0]))
  return words


def test_splits_share_no_file_and_no_word():
  """Held-out success must not be memorisation: all parameters are unseen."""
  words = [
    {w for family in FAMILIES for t in some(family, 25, split) for w in _words(t)}
    for split in terminal.SPLITS
  ]
  assert min(map(len, words)) > 500
  for one, other in itertools.combinations(words, 2):
    assert not one & other


def test_splits_share_no_source_and_no_vocabulary():
  """The same for the source data of the tasks."""
  loaded = [corpus.load(split) for split in terminal.SPLITS]
  for pool in (
    lambda c: {source.name.partition('.')[0] for source in c.sources},
    lambda c: set(c.words),
    lambda c: {hash(source.lines) for source in c.sources},
  ):
    assert min(len(pool(split)) for split in loaded) > 30
    for one, other in itertools.combinations(loaded, 2):
      assert not pool(one) & pool(other)


def test_made_up_names_are_many_and_of_one_split():
  """They represent unseen names: almost all distinct, spelled like real ones."""
  for split in terminal.SPLITS:
    rng = random.Random(0)
    words = [corpus.pseudo_word(rng, split) for _ in range(500)]
    stems = [corpus.pseudo_stem(rng, split) for _ in range(500)]
    assert len(set(words)) > 450 and len(set(stems)) > 480
    assert all(re.fullmatch('[a-z]{4,7}', word) for word in words)
    assert all(re.fullmatch('[A-Za-z]+(_[a-z]+)?[0-9]*', stem) for stem in stems)
    assert {corpus.split_of(word) for word in words + stems} == {split}
    assert any('_' in stem for stem in stems) and any(s[-1].isdigit() for s in stems)


def test_workspaces_hold_real_text():
  """Tasks are about real files: most lines occur verbatim in the library."""
  real = {
    line
    for split in terminal.SPLITS
    for s in corpus.load(split).sources
    for line in s.lines
  }
  for family in FAMILIES:
    lines = [
      line
      for task in some(family, 10)
      for content in task.files.values()
      for line in content.decode().splitlines()
    ]
    assert sum(line in real for line in lines) > 0.8 * len(lines), family


@pytest.mark.parametrize('family', FAMILIES)
def test_tasks_are_short_and_bounded(family):
  """A tiny model reads them: short instructions, few calls, small plain files."""
  for task in some(family, 60) + some(family, 30, 'held_out'):
    sentences = task.instruction.split('. ')
    assert len(sentences) <= task.baseline_calls
    for sentence in sentences:
      assert 2 <= len(sentence.split()) <= 18, task.instruction
      assert len(sentence) <= 110
    assert 1 <= task.baseline_calls <= steps.MAX_CALLS
    assert task.max_tool_calls == task.baseline_calls + 1
    assert 3 <= len(task.files) <= 12
    assert all(
      content.isascii() and len(content) < 9000 for content in task.files.values()
    )
    assert all(re.fullmatch(r'[A-Za-z]\w*\.(py|txt)', name) for name in task.files)
    assert task.expected.answer is None or len(task.expected.answer) <= 20


@pytest.mark.parametrize('family', FAMILIES)
def test_verdicts_are_about_answer_and_workspace(family):
  """Right end state: 1. Wrong answer, nothing done, or another file touched: 0."""
  for task in some(family, 6) + some(family, 3, 'held_out'):
    after, answer = dict(task.expected.files), task.expected.answer
    assert judge(task, after, answer or 'done') == 1.0
    if answer is None:
      assert judge(task, task.files, 'done') == 0.0
    else:
      wrong = (answer + '0', '', 'done', f'it is {answer}', task.instruction)
      assert {judge(task, after, text) for text in wrong} == {0.0}
    for name in after:
      assert judge(task, after | {name: after[name] + b'\n#'}, answer or 'done') == 0.0
      assert judge(task, after | {name: b''}, answer or 'done') == 0.0
      rest = {other: content for other, content in after.items() if other != name}
      assert judge(task, rest, answer or 'done') == 0.0
    assert judge(task, after | {'extra': b''}, answer or 'done') == 0.0


def test_answers_are_not_guessable():
  """No constant answer is often right in a family that asks for one."""
  for family in FAMILIES:
    answers = [task.expected.answer for task in some(family, 100)]
    asked = [answer for answer in answers if answer is not None]
    if asked:
      commonest = max(asked.count(answer) for answer in set(asked))
      assert commonest <= 0.3 * len(asked), family


def test_settings_change_tasks_and_are_part_of_the_spec():
  """A config makes tasks harder, and the spec rebuilds them without it."""
  tasks = some('steps_1', 40, files=(6, 8), lines=(30, 40), spare_calls=2)
  assert all(task.max_tool_calls == task.baseline_calls + 2 for task in tasks)
  assert all(6 <= len(task.files) <= 9 for task in tasks)
  assert all(
    content.count(b'\n') in (1, *range(24, 41))  # a note has one line
    for task in tasks
    for content in task.files.values()
  )
  real = {source.name for source in corpus.load('train').sources}
  for share, want in ((0.0, True), (1.0, False)):
    found = [n for t in some('steps_1', 20, pseudo_names=share) for n in t.files]
    assert any(name in real for name in found) == want


def test_weights_choose_families():
  """Weights are relative frequencies; unlisted families are never sampled."""
  config = terminal.TerminalConfig(weights={'trail': 3.0, 'steps_2': 1.0})
  families = [
    terminal.make(terminal.spec('train', i, 0, config)).family for i in range(400)
  ]
  assert set(families) == {'trail', 'steps_2'}
  assert 250 < families.count('trail') < 350
  equal = {terminal.make(terminal.spec('train', i)).family for i in range(300)}
  assert equal == set(FAMILIES)


@pytest.mark.parametrize(
  ('call', 'named'),
  [
    (lambda: terminal.spec('test', 0), 'test'),
    (lambda: terminal.spec('train', -1), '-1'),
    (lambda: terminal.spec('train', 0, family='sing'), 'sing'),
    (lambda: terminal.spec('train', 0, 0, _weights(sing=1.0)), 'sing'),
    (lambda: terminal.spec('train', 0, 0, _weights(trail=0.0)), 'weights'),
    (lambda: terminal.make('terminal/train/sing/0/0'), 'sing'),
    (lambda: terminal.make('swe/1'), 'swe/1'),
    (lambda: terminal.make('terminal/train/trail/0/0?{"colour":1}'), 'colour'),
    (lambda: terminal.make('terminal/train/trail/0/0?{"files":[1,2]}'), 'files'),
    (lambda: terminal.TerminalConfig(lines=(90, 20)), 'lines'),
    (lambda: terminal.TerminalConfig(pseudo_words=2.0), 'pseudo_words'),
  ],
)
def test_bad_specs_and_settings_are_named(call, named):
  """The error names what was wrong (law 9)."""
  with pytest.raises(ValueError, match=re.escape(named)):
    call()


def _weights(**weights):
  return dataclasses.replace(terminal.TerminalConfig(), weights=weights)
