"""Trains a small byte-level BPE for tiny policies that work in a shell.

A vocabulary of a few hundred tokens must be used where it helps a tiny model most. The
pre-tokenizer splits text by these rules, in order:

  1. Markup (M2's tags with their newlines, role headers, the constant lines of the
     system block): frequent pieces are one token each, listed literally.
  2. ` word` and ` -flag` include their space if and only if that exact string is in the
     vocabulary. Merges never cross the space, so any other word is a space followed by
     the same tokens as after a slash, a quote or a newline (except words that are whole
     in the vocabulary without the space, such as `py`: a separate ` py` is spelled
     out).
  3. Letters, single digits, newlines, spaces and punctuation never mix.

Frequent pre-tokens are whole in the vocabulary (`ignore_merges`). The merges are
trained on the other distinct pre-tokens, each counted once, so that they reflect
spelling rather than the few names that training tasks repeat: a new name also becomes
few tokens.

Any text round-trips. The result is an ordinary `tokenizer.json`; ids: 256 bytes, whole
entries, merges, special tokens.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from m2jax.text import markup
from m2jax.text.markup import BOS, EOS, ROLE, SPECIAL_TOKENS

# Fraction of the texts that must contain a string for it to be a whole token.
_WHOLE_SHARE = 0.02
_BOILERPLATE_SHARE = 0.25
# Largest fractions of the free vocabulary for markup and for whole pre-tokens.
_MARKUP_FRACTION = 0.12
_WHOLE_FRACTION = 0.55
# A word is prose if at most this fraction of it is in paths, calls, quotes and so on.
_IDENTIFIER_SHARE = 0.1
# A merge must occur in this many distinct pre-tokens, not just in one name.
_MERGE_WORDS = 3

_SPECIAL = re.compile('|'.join(re.escape(token) for token in SPECIAL_TOKENS))
_SYSTEM = re.compile(
  re.escape(BOS + ROLE) + 'system\n(.*?)' + re.escape(EOS), re.DOTALL
)
_TAG = r'</?(?:invoke|parameter|response|tools?)(?: name="[^"\n]*")?>'
_TAGS = re.compile(rf'\n?(?:{_TAG}\n?)+')
_ONE_TAG = re.compile(rf'{_TAG}\n?')
# Text at the start of a piece, after the role token.
_HEADERS = ('system\n', 'user\n', 'ai\n', 'tool\n<response>')
_HEADER = re.compile(r'\A(?:' + '|'.join(_HEADERS) + ')')
_TOOLS = (markup.TOOLS_HEADER, markup.TOOLS_FOOTER, markup.TOOLS_EXAMPLE)

_LETTERS = r'[\p{L}\p{M}]'
# Makes the preceding word part of a larger name: `word.py`, `word_x`, `word(`.
_COMPOUND = r"""[\p{N}_/\\=(\[{@*~-]|[.:'"][\p{L}\p{N}_]"""
_RULES = (
  r' {2,}',
  rf' --?(?>{_LETTERS}+)(?![\p{{N}}_-])',
  rf' (?>{_LETTERS}+)(?!{_COMPOUND})',
  rf'{_LETTERS}+',
  r'\p{N}',
  r'\n+',
  # Stops before `<`, so that punctuation never swallows the start of a tag.
  r' ?(?:<[^\s\p{L}\p{M}\p{N}<]*|[^\s\p{L}\p{M}\p{N}<]+)',
  r'\s',
)
# Precedes the word in a pre-token of the second and third rule.
_BEFORE_WORD = re.compile(r' -{0,2}')


def train(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
  """Trains a byte-level BPE of exactly `vocab_size` tokens.

  Args:
    texts: rendered chats, or plain text; special tokens in them count as special.
    vocab_size: at least 256 bytes + M2's special tokens + the role headers; surplus ids
      are `<unused_…>` tokens, which no plain text encodes to.

  Raises:
    ValueError: no texts, or a vocabulary too small for bytes and special tokens.
  """
  texts = list(texts)
  free = vocab_size - 256 - len(SPECIAL_TOKENS)
  if free < len(_HEADERS):
    least = vocab_size - free + len(_HEADERS)
    raise ValueError(f'vocab_size={vocab_size}: must be at least {least}')
  if not any(texts):
    raise ValueError('no text to train a tokenizer on: pass at least one string')
  literals = _markup(texts, int(free * _MARKUP_FRACTION))
  splitter = _splitter(literals)
  whole, rest = _whole_and_rest(
    texts, splitter, set(literals), int(free * _WHOLE_FRACTION)
  )
  entries = [_to_alphabet(entry) for entry in [*literals, *whole]]
  vocab = sorted(pre_tokenizers.ByteLevel.alphabet())
  vocab += [entry for entry in entries if len(entry) > 1]
  merges = []
  known = set(vocab)
  for left, right in _merges(rest, free):
    if left + right not in known:
      if len(vocab) == 256 + free:
        break
      vocab.append(left + right)
      known.add(left + right)
    merges.append((left, right))
  return _assemble(vocab, merges, literals, free + 256 - len(vocab))


def _assemble(
  vocab: Sequence[str],
  merges: Sequence[tuple[str, str]],
  literals: Sequence[str],
  unused: int,
) -> tokenizers.Tokenizer:
  ids = {token: i for i, token in enumerate(vocab)}
  model = models.BPE(vocab=ids, merges=list(merges), ignore_merges=True)
  out = tokenizers.Tokenizer(model)
  out.pre_tokenizer = pre_tokenizers.Sequence([_splitter(literals), _byte_level()])
  out.decoder = decoders.ByteLevel()
  fill = [f'<unused_{i}>' for i in range(unused)]
  out.add_special_tokens([*fill, *SPECIAL_TOKENS])
  return out


def _byte_level() -> pre_tokenizers.PreTokenizer:
  return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _to_alphabet(text: str) -> str:
  """The text in byte-level BPE's printable alphabet, one character per byte."""
  return ''.join(part for part, _ in _byte_level().pre_tokenize_str(text))


def _splitter(literals: Iterable[str]) -> pre_tokenizers.PreTokenizer:
  """Splits text into pre-tokens: by literals, longest first, then by the rules."""
  patterns = [_literal(text) for text in sorted(literals, key=len, reverse=True)]
  pattern = '|'.join([*patterns, *_RULES])
  return pre_tokenizers.Split(tokenizers.Regex(pattern), 'isolated')


def _literal(text: str) -> str:
  pattern = re.sub(r'([\\.^$*+?{}\[\]()|])', r'\\\1', text)
  if text.startswith(_HEADERS):
    return r'\A' + pattern  # only right after the role token
  # A line that starts with a word must not match inside a longer word.
  return r'(?<![^\n])' + pattern if text[0].isalnum() else pattern


def _pieces(text: str) -> list[str]:
  return [piece for piece in _SPECIAL.split(text) if piece]


def _markup(texts: Sequence[str], limit: int) -> list[str]:
  """Role headers, constant lines of the system block, and frequent tags."""
  systems = [match[1] for text in texts if (match := _SYSTEM.match(text))]
  lines = _boilerplate(['system\n' + block for block in systems])
  count = Counter()
  for text in texts:
    pieces = _pieces(_SYSTEM.sub('', text))
    runs = {run for piece in pieces for run in _TAGS.findall(_HEADER.sub('', piece))}
    single = {tag for piece in pieces for tag in _ONE_TAG.findall(piece)}
    count.update(runs | single)
  least = max(2, _WHOLE_SHARE * len(texts))
  tags = [tag for tag, n in count.items() if n >= least]
  tags.sort(key=lambda tag: (-count[tag] * len(tag), tag))
  # Include the template's constants: other chats have other tools between them.
  constant = [text for text in _TOOLS if any(text in system for system in set(systems))]
  found = dict.fromkeys([*_HEADERS, *constant, *lines, *tags])
  return list(found)[: max(limit, len(_HEADERS))]


def _boilerplate(systems: Sequence[str]) -> list[str]:
  """Longest runs of lines that many of the system blocks share verbatim."""
  least = max(2, _BOILERPLATE_SHARE * len(systems))
  blocks = Counter(systems)
  lines, runs = Counter(), Counter()
  cut = {
    block: [p.splitlines(keepends=True) for p in _pieces(block)] for block in blocks
  }
  for block, n in blocks.items():
    for line in {line for piece in cut[block] for line in piece}:
      lines[line] += n
  for block, n in blocks.items():
    found = set()
    for piece in cut[block]:
      run = ''
      for line in [*piece, '']:
        if line and lines[line] >= least:
          run += line
        else:
          found.add(run)
          run = ''
    for run in found:
      runs[run] += n
  long = [run for run, n in runs.items() if n >= least and len(run) >= 8]
  return sorted(long, key=lambda run: (-runs[run] * len(run), run))


def _whole_and_rest(
  texts: Sequence[str], splitter, literals: set[str], limit: int
) -> tuple[list[str], set[str]]:
  """Pre-tokens that become whole tokens, and the others without their space."""
  cuts: dict[str, tuple[set[str], set[str]]] = {}
  texts_with: Counter[str] = Counter()
  texts_naming: Counter[str] = Counter()
  for text in texts:
    seen, named = set(), set()
    for piece in _pieces(text):
      if piece not in cuts:
        tokens = [token for token, _ in splitter.pre_tokenize_str(piece)]
        cuts[piece] = set(tokens), _names(tokens)
      seen |= cuts[piece][0]
      named |= cuts[piece][1]
    texts_with.update(seen)
    texts_naming.update(named)
  whole = {}
  least = max(2, _WHOLE_SHARE * len(texts))
  for token, n in texts_with.items():
    if n < least or token in literals or len(token.encode()) < 2:
      continue
    if _is_spaced(token) and texts_naming[token[1:]] > _IDENTIFIER_SHARE * n:
      continue
    whole[token] = n * (1 + len(token) // 4)  # roughly the number of tokens saved
  chosen = sorted(whole, key=lambda token: (-whole[token], token))[:limit]
  known = literals.union(chosen)
  rest = set()
  for token in texts_with:
    if token in known:
      continue
    cut = _BEFORE_WORD.match(token).end() if _is_spaced(token) else 0
    rest.update((token[:cut], token[cut:]))
  return chosen, rest - known - {''}


def _is_spaced(token: str) -> bool:
  """Whether a pre-token is a word or flag with the space before it."""
  word = token[_BEFORE_WORD.match(token).end() :] if token[0] == ' ' else ''
  return bool(word) and unicodedata.category(word[0])[0] in 'LM'


def _names(tokens: Sequence[str]) -> set[str]:
  """Words in paths, calls, quotes and the like, rather than after a plain space."""
  # A separate space before a word means that the name continues: ` name.py`.
  pairs = zip(['\n', *tokens], tokens, strict=False)
  return {
    word
    for before, word in pairs
    if word[0].isalpha() and (before == ' ' or not before[-1].isspace())
  }


def _merges(rest: set[str], free: int) -> list[tuple[str, str]]:
  """Trains merges on the distinct pre-tokens; each occurs in several of them."""
  trainee = tokenizers.Tokenizer(models.BPE())
  trainee.pre_tokenizer = _byte_level()
  trainer = trainers.BpeTrainer(
    vocab_size=256 + 2 * free,  # more than needed: some are in the vocabulary
    min_frequency=_MERGE_WORDS,
    show_progress=False,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
  )
  trainee.train_from_iterator(sorted(rest), trainer)
  model = json.loads(trainee.to_str())['model']
  return [tuple(pair) for pair in model['merges']]
