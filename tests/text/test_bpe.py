"""What the trained vocabulary is for: few tokens, and cuts that do not move."""

import json
import os
import random
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from m2jax.text import bpe, chat, tokenizer
from tests.text.conftest import name
from tests.text.examples import MANY


def pieces(t, text):
  return [t.decode([i]) for i in t.encode(text, special=False)]


IDENTIFIER = st.text('abcdefghiklmnoprstuwxyzABC', min_size=2, max_size=10)


@MANY
@given(word=IDENTIFIER)
@example(word='py')  # one token in `.py`, hence in the vocabulary without its merges
def test_identifiers_are_cut_alike_wherever_they_stand(trained, word):
  """Copying a name from prompt to command is easy only if its tokens stay the same;
  a word that is one token anyway may be spelled out, one way, after a space."""
  alone = pieces(trained, word)
  if f' {word}' in {trained.decode([i]) for i in range(trained.vocab_size)}:
    return  # a prose word, frequent in training
  for before in ('\n', ' ', '/', '"', "'", '_', '.', '(', '  ', '7', '-c ', '='):
    allowed = [alone]
    if len(alone) == 1 and before[-1] == ' ':
      allowed.append(pieces(trained, f' {word}')[1:])
    for after in ('', ' ', '/', '.py', '"', '_x', '(', '\n', '?', ', ', '=', '7'):
      found = pieces(trained, before + word + after)
      start = len(pieces(trained, before))
      cuts = [found[start : start + len(want)] == want for want in allowed]
      assert any(cuts), (before, after, found)


@MANY
@given(text=st.text('ab.c_19 \n/"<', max_size=30))
def test_classes_never_mix(trained, text):
  """Letters never merge across dots, underscores or digits; digits stay separate."""
  for piece in pieces(trained, text):
    word = piece.removeprefix(' ').lstrip('-')
    assert not any(c.isdigit() for c in piece) or len(piece) == 1
    assert not any(c.isalpha() for c in word) or word.isalpha()


def test_markup_is_one_token(trained):
  """Tags are the policy's syntax: each must be one decision."""
  for text in (
    '\n<invoke name="sh">\n<parameter name="cmd">',
    '<invoke name="sh">\n',
    '<parameter name="cmd">',
    '</parameter>\n</invoke>\n',
    '</parameter>\n',
    '</invoke>\n',
    '<response>',
    '</response>',
    'tool\n<response>',
    'user\n',
    'ai\n',
    '\n\n\n',
  ):
    assert len(pieces(trained, text)) == 1, text
  # Punctuation before a tag must not swallow its first character.
  assert pieces(trained, 'x")</parameter>\n')[-1] == '</parameter>\n'


def test_prose_words_are_one_token(trained):
  """Words of instructions cost one token each, their space included."""
  text = 'How many lines of x contain y?'
  assert pieces(trained, text) == [
    'How', ' many', ' lines', ' of', ' ', 'x', ' contain', ' ', 'y', '?',
  ]  # fmt: skip


def test_the_constant_prefix_is_short(trained, demonstrations, tool):
  """System text and tools, which every prompt contains, add almost no cost."""
  system = demonstrations[0][:1]
  ids = tokenizer.encode_chat(trained, chat.segments(system, [tool])).ids
  assert len(ids) <= 10
  # Another system text and another tool cost their own text, not the template's again.
  other = [{'role': 'system', 'content': 'Do it.'}]
  ids = tokenizer.encode_chat(trained, chat.segments(other, [{'name': 'run'}])).ids
  assert len(ids) <= 50


def test_unseen_names_cost_little_more_than_seen_ones(trained, demonstrations):
  """Held-out files have other names: a vocabulary of names would not transfer."""

  def mean_tokens(seed):
    rng = random.Random(seed)
    return sum(len(pieces(trained, name(rng))) for _ in range(200)) / 200

  seen, unseen = mean_tokens(0), mean_tokens(1)
  assert unseen < 4
  assert unseen < 1.15 * seen
  questions = ' '.join(m[1]['content'] for m in demonstrations)
  whole = [trained.decode([i]) for i in range(trained.vocab_size)]
  names = {w.split('.')[0] for w in questions.split() if w.endswith('.py')}
  assert len(names.intersection(whole)) < len(names) / 5


def test_vocabulary_is_exactly_as_large_as_asked(texts):
  """The embedding has vocab_size rows: more would not fit, fewer would be lost."""
  for size in (300, 512, 768):
    t = tokenizer.train(texts, size)
    assert t.vocab_size == size
    assert sorted(t._hf.get_vocab().values()) == list(range(size))
  few = tokenizer.train(['ab'], 512)  # the texts cannot fill it
  assert few.vocab_size == 512
  assert few.decode(few.encode('<unused_0>', special=False)) == '<unused_0>'


def test_training_is_deterministic(texts):
  """A restarted job trains its tokenizer again and must get the same ids."""
  first = bpe.train(texts[:100], 600).to_str()
  assert bpe.train(texts[:100], 600).to_str() == first
  code = (
    'import sys, json; from m2jax.text import bpe\n'
    'sys.stdout.write(bpe.train(json.load(sys.stdin), 600).to_str())'
  )
  done = subprocess.run(
    [sys.executable, '-c', code],
    input=json.dumps(texts[:100]),
    capture_output=True,
    text=True,
    timeout=60,
    check=True,
    env={**os.environ, 'PYTHONHASHSEED': '7'},
  )
  assert done.stdout == first


def test_refusals():
  """Law 9: what cannot be trained says why."""
  with pytest.raises(ValueError, match='vocab_size=100: must be at least 267'):
    tokenizer.train(['a'], 100)
  with pytest.raises(ValueError, match='no text'):
    tokenizer.train([], 512)
