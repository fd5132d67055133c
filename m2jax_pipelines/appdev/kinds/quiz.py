"""A quiz of questions.json with a score; the verifier has other questions."""

from __future__ import annotations

import json
import random

from m2jax_pipelines.appdev import app
from m2jax_pipelines.appdev.app import Criterion, button, click, role, text, texts
from m2jax_pipelines.appdev.kinds import words

_TITLES = ('Pub quiz', 'Safety test', 'Driving theory', 'Word quiz', 'Staff training')
_PROGRESS = ('Question {at} of {all}', '{at}/{all}', 'No. {at} ({all} in all)')
_VERDICTS = (('Passed', 'Failed'), ('Well done', 'Try again'), ('You pass', 'No pass'))


def draw(rng: random.Random) -> app.App:
  """A quiz."""
  passed, failed = rng.choice(_VERDICTS)
  config = {
    'progress': rng.choice(_PROGRESS),
    'passed': passed,
    'failed': failed,
    'mark': rng.choice((50, 60, 75)),
    'review': rng.random() < 0.6,
    **dict.fromkeys(('guarded', 'judged', 'passing', 'again'), True),
  }
  mutants = {'guarded': 'guarded', 'judged': 'fails', 'passing': 'fails'}
  mutants |= {'again': 'again'}
  mutants |= {'review': 'fails'} if config['review'] else {}
  return app.App(
    kind='quiz',
    title=rng.choice(_TITLES),
    about='a quiz that shows one question after the other, and a score.',
    rules=_rules(config),
    criteria=_criteria(config, rng),
    view=[],
    config=config,
    mutants=mutants,
    data={'questions.json': json.dumps(_questions(rng), indent=1)},
    view_files={'questions.json': json.dumps(_questions(rng))},
  )


def _questions(rng):
  found = []
  for subject in words.phrases(rng, rng.randint(4, 5)):
    options = words.names(rng, rng.randint(3, 4))
    answer = rng.randrange(len(options))
    text_ = f'What belongs to {subject}?'
    found.append({'question': text_, 'options': options, 'answer': answer})
  return found


def _rules(c):
  rules = [
    'When it opens, the page fetches questions.json, a list of objects with '
    '"question", '
    '"options" (a list of texts) and "answer" (index of the right option, from 0). The '
    'file that is there is an example: the app must work with any other questions.',
    'One question is shown at a time, in the order of the file, in an element with '
    'data-testid="question"; its options are radio buttons with the options as labels.',
    f'An element with data-testid="progress" says "{c["progress"]}": the number of the '
    'question, from 1, and the number of all questions.',
    'A button "Next" is disabled until an option is chosen. It goes to the next '
    'question, '
    'and after the last one to the result.',
    'The result is "Score: X of Y" in an element with data-testid="score", where X '
    'is the '
    'number of right answers and Y that of all questions. An element with '
    f'data-testid="verdict" says "{c["passed"]}" if at least {c["mark"]} % are '
    f'right, and '
    f'"{c["failed"]}" otherwise.',
    'A button "Again" on the result begins again with the first question.',
  ]
  if c['review']:
    rules.append(
      'The result lists the questions that were answered wrongly, in their order, '
      'each in '
      'an element with data-testid="missed".'
    )
  return rules


def _answer(question, right):
  wanted = question['answer']
  if not right:
    wanted = (wanted + 1) % len(question['options'])
  choice = ['check', role('radio', question['options'][wanted]), True]
  return [text('question', question['question']), choice, click('Next')]


def _run(c, questions, rights):
  """Answers all; expects the result."""
  steps = []
  for question, right in zip(questions, rights, strict=True):
    steps += _answer(question, right)
  share, count = sum(rights) * 100, len(questions)
  said = c['passed'] if share >= c['mark'] * count else c['failed']
  steps.append(text('score', f'Score: {sum(rights)} of {count}'))
  steps.append(text('verdict', said))
  if c['review']:
    wrong = [q['question'] for q, r in zip(questions, rights, strict=True) if not r]
    steps.append(texts('missed', wrong))
  return steps


def _criteria(c, rng):
  def criterion(own, what, make):
    questions = _questions(rng)
    files = {'questions.json': json.dumps(questions)}
    return Criterion(own, what, make(questions), files)

  def progress(at, questions):
    said = c['progress'].replace('{at}', str(at))
    return text('progress', said.replace('{all}', str(len(questions))))

  def most(questions):
    wrong = rng.randrange(len(questions))
    return _run(c, questions, [i != wrong for i in range(len(questions))])

  def few(questions):
    right = rng.randrange(len(questions))
    return _run(c, questions, [i == right for i in range(len(questions))])

  def guarded(questions):
    first = [['enabled', button('Next'), False], *_answer(questions[0], True)]
    return [*first, ['enabled', button('Next'), False]]

  def again(questions):
    steps = _run(c, questions, [True] * len(questions))
    return [*steps, click('Again'), progress(1, questions), *few(questions)]

  return [
    criterion(
      'progress',
      'the number of the question',
      lambda q: [progress(1, q), *_answer(q[0], False), progress(2, q)],
    ),
    criterion('passes', 'one wrong answer', most),
    criterion('fails', 'one right answer', few),
    criterion('guarded', 'Next is disabled until an option is chosen', guarded),
    criterion('again', 'it begins again', again),
  ]
