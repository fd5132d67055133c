"""Multi-hop questions by the link graph of a corpus, with their entities obscured.

    chain    a clue leads to a first passage; each further one is the only passage, of
             those that the last links to, that mentions a word
    meeting  two clues lead to two passages; the answer is the only passage that both
             link to

A clue is a sentence of the passage without its names: titles, links, capitalised words
and numbers are replaced. Every step has exactly one result, by a check over the whole
corpus. `lazy` lists what an agent finds without following links; if that includes the
answer, the question is dropped.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import re
from collections.abc import Iterator, Sequence

from m2jax_pipelines.deep_search.corpora import Corpus, Passage

_WORD = re.compile(r'[a-z]{5,}')
_SENTENCE = re.compile(r'(?<=[.!?])\s+(?=[A-Z{`])|\n\s*\n')
_MARKUP = re.compile(
  r'\[?\{[^{}]*\}\]?|:\w+:`[^`]*`|``[^`]*``|<[^<>]*>|\([^()]*\)|[*`|]'
)
_MIN_CLUE_WORDS, _MAX_CLUE_CHARS = 8, 320
_RARE, _COMMON_SHARE = 3, 0.04  # passages with a word that may choose a link
_MIN_LINKS, _MAX_LINKS = 3, 60
_MAX_SHARED = 0.8  # of a clue's words, in any other passage
CLUE_RANK = 5  # a clue is usable if its passage is among the first results


@dataclasses.dataclass(frozen=True)
class Question:
  """A question with its proof.

  Attributes:
    family: 'chain' or 'meeting'.
    starts: clues.
    words: the words that choose the links, in order.
    path: ids of the passages, the last is the answer's.
    answers: accepted titles.
  """

  family: str
  starts: tuple[str, ...]
  words: tuple[str, ...]
  path: tuple[str, ...]
  answers: tuple[str, ...]

  @property
  def hops(self) -> int:
    """Passages that must be read."""
    return len(self.path)


class Graph:
  """A corpus with what questions need: frequencies of words, and a ranker."""

  def __init__(self, corpus: Corpus, ranker):
    self.corpus, self._ranker = corpus, ranker
    self.lower = {
      p.id: f'{p.title}\n{p.text}'.lower() for p in corpus.passages.values()
    }
    self._words = {one: set(_WORD.findall(text)) for one, text in self.lower.items()}
    self._count = collections.Counter(w for ws in self._words.values() for w in ws)
    self._common = max(_RARE + 1, int(_COMMON_SHARE * len(self.lower)))
    self._into = collections.defaultdict(list)
    for passage in corpus.passages.values():
      for link in passage.links:
        self._into[link].append(passage.id)
    titles = collections.Counter(p.title.casefold() for p in corpus.passages.values())
    self._ambiguous = {t for t, n in titles.items() if n > 1}

  def clue(self, passage: Passage, rng: random.Random) -> str:
    """A sentence of the passage that finds it and names nothing; '' for none."""
    sentences = [' '.join(s.split()) for s in _SENTENCE.split(passage.text)]
    rng.shuffle(sentences)
    for sentence in sentences[:4]:
      clue = obscured(sentence, passage.titles)
      if len(_WORD.findall(clue.lower())) < _MIN_CLUE_WORDS:
        continue
      if len(clue) > _MAX_CLUE_CHARS or not clue[:1].isalpha():
        continue
      if not self._only(passage.id, clue):
        continue
      if passage.id in self._ranker.search(clue, CLUE_RANK)[:CLUE_RANK]:
        return clue
    return ''

  def _only(self, one: str, clue: str) -> bool:
    """Whether no other passage has nearly all words of a clue."""
    wanted = set(_WORD.findall(clue.lower()))
    most = _MAX_SHARED * len(wanted)
    return all(len(wanted & w) <= most for i, w in self._words.items() if i != one)

  def step(self, path: Sequence[str], rng: random.Random) -> tuple[str, str] | None:
    """(word, passage) of a link that only its word chooses; None if there is none."""
    links = self.corpus.passages[path[-1]].links
    if not _MIN_LINKS <= len(links) <= _MAX_LINKS:
      return None
    for target in rng.sample(links, len(links)):
      if target in path or self._named(target) in self._ambiguous:
        continue
      titles = ' '.join(self.corpus.passages[target].titles).lower()
      words = [
        w
        for w in sorted(self._words[target])
        if _RARE <= self._count[w] <= self._common and w not in titles
      ]
      rng.shuffle(words)
      for word in words:
        if sum(word in self.lower[link] for link in links) == 1:
          return word, target
    return None

  def chain(self, hops: int, rng: random.Random) -> Question | None:
    """A chain over `hops` passages from a random one; None if it leads nowhere."""
    first = rng.choice(list(self.corpus.passages))
    path, words = [first], []
    while len(path) < hops:
      found = self.step(path, rng)
      if found is None:
        return None
      words.append(found[0])
      path.append(found[1])
    start = self.clue(self.corpus.passages[first], rng)
    return self._question('chain', [start], words, path) if start else None

  def meeting(self, rng: random.Random) -> Question | None:
    """Two passages with exactly one link in common; None if the draw has none."""
    target = rng.choice(list(self.corpus.passages))
    into = self._into[target]
    if not 2 <= len(into) <= _MAX_LINKS or self._named(target) in self._ambiguous:
      return None
    pair = rng.sample(into, 2)
    one, other = (self.corpus.passages[i] for i in pair)
    if set(one.links) & set(other.links) != {target}:
      return None
    if one.id in other.links or other.id in one.links:
      return None
    starts = [self.clue(passage, rng) for passage in (one, other)]
    if not all(starts):
      return None
    return self._question('meeting', starts, [], [*pair, target])

  def _named(self, one: str) -> str:
    return self.corpus.passages[one].title.casefold()

  def _question(self, family, starts, words, path) -> Question | None:
    answers = self.corpus.passages[path[-1]].titles
    text = _spaced(' '.join([*starts, *words]))
    if any(_spaced(answer) in text for answer in answers):
      return None
    return Question(family, tuple(starts), tuple(words), tuple(path), answers)

  def lazy(self, question: Question, text: str) -> Iterator[str]:
    """Passages that one search finds first, for the whole question and each clue."""
    for query in (text, *question.starts, *question.words):
      yield from self._ranker.search(query, 1)[:1]


def shared(clue: str, text: str) -> float:
  """The share of a clue's words that a text has."""
  words = set(_WORD.findall(clue.lower()))
  return len(words & set(_WORD.findall(text.lower()))) / len(words)


def _spaced(text: str) -> str:
  """The words of a text: the answer 'C' is not in 'character'."""
  return f' {" ".join(re.findall("[0-9a-z_]+", text.lower()))} '


def obscured(sentence: str, titles: Sequence[str]) -> str:
  """A sentence without names, numbers and markup."""
  text = sentence
  for title in sorted(titles, key=len, reverse=True):
    text = re.sub(rf'(?<!\w){re.escape(title)}(?!\w)', '{}', text, flags=re.I)
  text = _MARKUP.sub(lambda m: 'something' if m.group()[0] in '[{:`' else ' ', text)
  words = []
  for number, word in enumerate(text.split()):
    bare = word.strip('.,;:!?"\'()[]')
    if any(c.isdigit() for c in bare):
      word = word.replace(bare, 'some number')
    elif any(c.isupper() for c in (bare[1:] if number == 0 else bare)) and bare != 'I':
      word = word.replace(bare, 'a name')
    words.append(word)
  text = ' '.join(words)
  for repeated in ('something', 'some number', 'a name'):
    text = re.sub(rf'{repeated}(?:[\s,./-]+{repeated})+', repeated, text)
  return text


def text(question: Question, description: str) -> str:
  """The question in words."""
  lines = [f'The library is {description}.']
  note = ' (names and numbers are replaced)'
  if question.family == 'meeting':
    for letter, clue in zip('AB', question.starts, strict=True):
      lines.append(f'- Passage {letter} says{note}: "{clue}"')
    lines.append('- Passages A and B both link to exactly one passage, C.')
    lines.append('What is the title of passage C?')
  else:
    lines.append(f'1. Find the passage that says{note}: "{question.starts[0]}"')
    for number, word in enumerate(question.words, 2):
      lines.append(
        f'{number}. Of the passages that it links to, take the only one that mentions '
        f'"{word}".'
      )
    lines.append('What is the title of the last passage?')
  return '\n'.join(lines)
