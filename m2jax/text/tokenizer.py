"""Encodes text and chats as token ids, and decodes ids.

Wraps a Hugging Face `tokenizers.Tokenizer` with two additional rules (law 4): plain
text never encodes to a special token, whatever it contains; and each id decodes to
bytes by itself, so that text can be streamed without broken characters.
"""

from __future__ import annotations

import codecs
import functools
import json
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from absl import logging

from m2jax.text import bpe, chat, markup

# Prompts of a group and pieces of the template repeat; at most about 40 MB.
_CACHED_TEXT_CHARS = 2048
_CACHED_TEXTS = 2048
_MAX_FILE_BYTES = 100_000_000
_MAX_GROWTH = 64  # real ones replace spaces by a character, and quotes by two
_UNKNOWN = '\N{REPLACEMENT CHARACTER}'.encode()


class Tokenizer:
  """A tokenizer with M2's special tokens.

  Attributes:
    vocab_size: largest id + 1.
    longest_token_bytes: length of the longest token that plain text encodes to; None if
      `fewest_tokens` has no bound.
    special_ids: text → id of M2's special tokens.
    bos_id, role_id, eos_id: `]~!b[`, `]~b]`, `[e~[`.
    think_id, think_end_id, tool_call_id, tool_call_end_id: the two pairs.
  """

  def __init__(self, hf: tokenizers.Tokenizer):
    """Wraps a tokenizer of the library; adds the missing special tokens of M2.

    Raises:
      ValueError: the decoder does not decode single tokens to bytes, the model would
        encode plain text to a special token, or the normalizer makes text much longer.
    """
    missing = [t for t in markup.SPECIAL_TOKENS if hf.token_to_id(t) is None]
    if missing:
      logging.info('The tokenizer lacks %s: added at the end.', ' '.join(missing))
    hf.add_special_tokens(list(markup.SPECIAL_TOKENS))
    hf.no_truncation()
    hf.no_padding()
    _check_growth(hf)
    self._hf = hf
    self._bytes = _token_bytes(hf)
    self._plain = _without_special_tokens(hf)
    self.special_ids: dict[str, Any] = {
      t: hf.token_to_id(t) for t in markup.SPECIAL_TOKENS
    }
    ids = self.special_ids
    self.bos_id, self.role_id = ids[markup.BOS], ids[markup.ROLE]
    self.eos_id = ids[markup.EOS]
    self.think_id, self.think_end_id = ids[markup.THINK], ids[markup.THINK_END]
    self.tool_call_id = ids[markup.TOOL_CALL]
    self.tool_call_end_id = ids[markup.TOOL_CALL_END]
    self.vocab_size = len(self._bytes)
    self._weights = _byte_weights(hf, self._bytes)
    self.longest_token_bytes = (
      None if self._weights is None else round(1 / self._weights.min())
    )
    self._cached = functools.lru_cache(_CACHED_TEXTS)(self._encode_plain)
    for token in markup.SPECIAL_TOKENS:
      if not set(ids.values()).isdisjoint(self._encode_plain(token)):
        raise ValueError(
          f'this tokenizer encodes the plain text {token!r} to a special token, so '
          'that any user could write one; use a model that splits it'
        )

  def encode(self, text: str, special: bool = True) -> list[int]:
    """Token ids of a text.

    Args:
      text: any valid Unicode text.
      special: whether special tokens in it count as such, only for trusted text. False
        encodes them as plain text.

    Raises:
      ValueError: the text contains a lone surrogate.
    """
    if not special:
      if len(text) <= _CACHED_TEXT_CHARS:
        return list(self._cached(text))
      return list(self._encode_plain(text))
    return _ids(self._hf, text)

  def fewest_tokens(self, text: str) -> int:
    """A lower bound on the number of tokens of a plain text, from its bytes only.

    The weight of a byte is 1/n, where n is the length in bytes of the longest token
    that contains it. The weights of a token's bytes sum to at most 1, so that the sum
    over the text is a lower bound. It is 0 for a tokenizer that changes text before
    splitting it, or that maps several bytes to one unknown token.

    Raises:
      ValueError: the text contains a lone surrogate.
    """
    if self._weights is None:
      return 0
    data = np.frombuffer(_utf8(text), np.uint8)
    return math.ceil(np.bincount(data, minlength=256) @ self._weights - 1e-6)

  def decode(self, ids: Iterable[int]) -> str:
    """The text of ids, including special tokens; invalid UTF-8 becomes U+FFFD."""
    return self.decode_bytes(ids).decode('utf-8', 'replace')

  def decode_bytes(self, ids: Iterable[int]) -> bytes:
    """The bytes of ids; an id outside the vocabulary gives U+FFFD."""
    table = self._bytes
    size = len(table)
    return b''.join(table[i] if 0 <= i < size else _UNKNOWN for i in ids)

  def tokens(self) -> tuple[bytes, ...]:
    """The bytes of each id; of tokenizers where these are equal, ids mean the same."""
    return tuple(self._bytes)

  def to_json(self) -> str:
    """The text of a `tokenizer.json`."""
    return self._hf.to_str()

  def save(self, path: str | os.PathLike) -> None:
    """Writes a `tokenizer.json`, to `path` or into the directory `path`."""
    path = os.fspath(path)
    self._hf.save(os.path.join(path, _FILE) if os.path.isdir(path) else path)

  def _encode_plain(self, text: str) -> tuple[int, ...]:
    return tuple(_ids(self._plain, text))


_FILE = 'tokenizer.json'


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
  """Trains a byte-level BPE of exactly `vocab_size` tokens; see `bpe.train`."""
  return Tokenizer(bpe.train(texts, vocab_size))


def load(path: str | os.PathLike) -> Tokenizer:
  """Loads a Hugging Face `tokenizer.json` from a file or a directory.

  Raises:
    FileNotFoundError: there is none.
    ValueError: see `loads`.
  """
  path = os.fspath(path)
  if os.path.isdir(path):
    path = os.path.join(path, _FILE)
  if not os.path.isfile(path):
    raise FileNotFoundError(f'no tokenizer at {path}: pass a {_FILE} or its directory')
  with open(path, 'rb') as file:
    return loads(file.read(_MAX_FILE_BYTES + 1), path)


def loads(content: bytes, path: str = _FILE) -> Tokenizer:
  """The tokenizer of the content of a `tokenizer.json`.

  Raises:
    ValueError: it is not a tokenizer or too large, or see `Tokenizer`; names the path.
  """
  if len(content) > _MAX_FILE_BYTES:
    raise ValueError(f'{path}: more than {_MAX_FILE_BYTES} bytes')
  try:
    hf = tokenizers.Tokenizer.from_buffer(content)
  except Exception as error:  # the library raises bare Exception
    raise ValueError(f'{path} is not a Hugging Face {_FILE}: {error}') from error
  return Tokenizer(hf)


class EncodedChat(NamedTuple):
  """Token ids of a chat, and whether the model generates each."""

  ids: list[int]
  owned: list[bool]


def encode_chat(tokenizer: Tokenizer, segments: Iterable[chat.Segment]) -> EncodedChat:
  """Encodes `chat.segments`; gateway and SFT both use this function.

  Special pieces become their id. Adjacent plain pieces with the same owner are encoded
  as one text, so that text is split only between prompt and response, where generation
  starts.
  """
  ids: list[int] = []
  owned: list[bool] = []
  pending = ''
  owner = False

  def flush() -> None:
    nonlocal pending
    if pending:
      ids.extend(tokenizer.encode(pending, special=False))
      owned.extend([owner] * (len(ids) - len(owned)))
      pending = ''

  for segment in segments:
    if segment.special:
      flush()
      ids.append(tokenizer.special_ids[segment.text])
      owned.append(segment.owned)
    else:
      if segment.owned != owner:
        flush()
        owner = segment.owned
      pending += segment.text
  flush()
  return EncodedChat(ids, owned)


class Detokenizer:
  """Decodes ids incrementally, holding back the bytes of an incomplete character.

  The concatenation of all pieces, including those of `flush`, is `Tokenizer.decode` of
  all ids. Each special token is a separate piece; plain tokens that spell one are text.
  """

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    self._specials = {i: text for text, i in tokenizer.special_ids.items()}
    self._utf8 = codecs.getincrementaldecoder('utf-8')('replace')

  def push(self, ids: Iterable[int]) -> list[chat.Piece]:
    """The pieces that these ids complete; may be empty."""
    out: list[chat.Piece] = []
    plain: list[int] = []

    def end_text(final: bool) -> None:
      data = self._tokenizer.decode_bytes(plain)
      if text := self._utf8.decode(data, final):
        out.append(chat.Piece(text))
      plain.clear()

    for i in ids:
      special = self._specials.get(i)
      if special is None:
        plain.append(i)
      else:
        end_text(final=True)
        out.append(chat.Piece(special, special=True))
    end_text(final=False)
    return out

  def flush(self) -> list[chat.Piece]:
    """Ends the text: an incomplete character becomes U+FFFD."""
    text = self._utf8.decode(b'', final=True)
    return [chat.Piece(text)] if text else []


def pieces(tokenizer: Tokenizer, ids: Iterable[int]) -> list[chat.Piece]:
  """Decodes a whole response for `chat.parse`."""
  detokenizer = Detokenizer(tokenizer)
  return [*detokenizer.push(ids), *detokenizer.flush()]


def _ids(hf: tokenizers.Tokenizer, text: str) -> list[int]:
  try:
    return hf.encode(text, add_special_tokens=False).ids
  except TypeError:
    _utf8(text)
    raise
  except BaseException as error:  # a panic of the library is no Exception
    if type(error).__name__ != 'PanicException':
      raise
    raise ValueError(f'the tokenizer failed on a text: {error}') from None


def _check_growth(hf: tokenizers.Tokenizer) -> None:
  """Raises ValueError if replacements could make a text much longer, each in turn."""
  growth = 1
  for step in _steps(json.loads(hf.to_str())['normalizer'], 'normalizers'):
    growth *= 1 + len(step.get('content', ''))  # of `Replace`, also between characters
  if growth > _MAX_GROWTH:
    raise ValueError(f'this tokenizer replaces a character by up to {growth} others')


def _utf8(text: str) -> bytes:
  try:
    return text.encode()
  except UnicodeEncodeError as error:
    raise ValueError(
      f'text contains a lone surrogate at character {error.start}: not valid Unicode'
    ) from None


def _byte_weights(
  hf: tokenizers.Tokenizer, token_bytes: list[bytes]
) -> np.ndarray | None:
  """[256] float64: 1 / longest token with the byte; None if unknown (fewest_tokens)."""
  spec = json.loads(hf.to_str())
  kinds = {step['type'] for step in _steps(spec['pre_tokenizer'], 'pretokenizers')}
  plain_added = [t for t in spec['added_tokens'] if not t['special']]
  if (
    spec['normalizer'] is not None
    or 'ByteLevel' not in kinds
    or not kinds <= {'Sequence', 'ByteLevel', 'Split', 'Digits'}
    or '"behavior": "Removed"' in json.dumps(spec['pre_tokenizer'])
    or any(token['lstrip'] or token['rstrip'] for token in plain_added)
  ):
    return None  # text may change, or lose bytes, before it is split into tokens
  never = {token['id'] for token in spec['added_tokens'] if token['special']}
  plain = {token for i, token in enumerate(token_bytes) if i not in never}
  if not plain.issuperset(bytes([byte]) for byte in range(256)):
    return None
  longest = np.zeros(256)
  for token in plain:
    at = list(set(token))
    longest[at] = np.maximum(longest[at], len(token))
  return 1 / longest


def _without_special_tokens(hf: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
  """The same tokenizer, with special tokens encoded as plain text."""
  spec = json.loads(hf.to_str())
  for token in spec['added_tokens']:
    token['special'] |= token['content'] in markup.SPECIAL_TOKENS
  spec['post_processor'] = None
  plain = tokenizers.Tokenizer.from_str(json.dumps(spec))
  plain.encode_special_tokens = True
  return plain


def _token_bytes(hf: tokenizers.Tokenizer) -> list[bytes]:
  """The bytes of each id, for byte-level and for byte-fallback vocabularies."""
  spec = json.loads(hf.to_str())
  kinds = {step['type'] for step in _steps(spec['decoder'], 'decoders')}
  if 'ByteLevel' in kinds:
    to_bytes = _byte_level_bytes
  elif kinds & {'ByteFallback', 'Metaspace'}:
    to_bytes = _sentencepiece_bytes
  else:
    raise ValueError(
      f'decoder {sorted(kinds)} does not give the bytes of single tokens: use a '
      'byte-level or byte-fallback tokenizer'
    )
  added = {token['id']: token['content'] for token in spec['added_tokens']}
  vocab = hf.get_vocab(with_added_tokens=True)
  out = [_UNKNOWN] * (max(vocab.values()) + 1)
  for token, i in vocab.items():
    out[i] = token.encode() if i in added else to_bytes(token)
  return out


def _steps(step: dict | None, children: str) -> Iterator[dict]:
  """A decoder or pre-tokenizer and, if it is a sequence, its parts."""
  if step is None:
    return
  yield step
  for part in step.get(children, ()):
    yield from _steps(part, children)


def _byte_level_bytes(token: str) -> bytes:
  try:
    return bytes(_ALPHABET[char] for char in token)
  except KeyError:
    return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
  if len(token) == 6 and token.startswith('<0x') and token.endswith('>'):
    return bytes([int(token[3:5], 16)])
  return token.replace('\u2581', ' ').encode()


def _byte_alphabet() -> dict[str, int]:
  """Byte-level BPE's printable character of each byte, reversed (GPT-2's table)."""
  printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  table = {chr(byte): byte for byte in printable}
  others = [byte for byte in range(256) if chr(byte) not in table]
  return table | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()
