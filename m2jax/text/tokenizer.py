"""Text to token ids and back, and the one way to encode a chat.

Wraps a Hugging Face `tokenizers.Tokenizer`. Two rules on top of the library (law 4):
plain text never encodes to a special token, whatever it contains; and ids decode to
bytes one by one, so text can be streamed and never shows a broken character.
"""

from __future__ import annotations

import codecs
import functools
import json
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import tokenizers
from absl import logging

from m2jax.text import bpe, markup
from m2jax.text.chat import Segment

# Prompts of one group and template pieces repeat; at most some 40 MB.
_CACHED_TEXT_CHARS = 2048
_CACHED_TEXTS = 2048
_UNKNOWN = '\N{REPLACEMENT CHARACTER}'.encode()


class Tokenizer:
  """A tokenizer with M2's special tokens.

  Attributes:
    vocab_size: largest id + 1.
    special_ids: id of each of M2's special tokens by its text.
    bos_id, role_id, eos_id: `]~!b[`, `]~b]`, `[e~[`.
    think_id, think_end_id, tool_call_id, tool_call_end_id: the two pairs.
  """

  def __init__(self, hf: tokenizers.Tokenizer):
    """Takes a library tokenizer; adds those of M2's special tokens that it lacks.

    Raises:
      ValueError: its decoder does not give bytes token by token, or its model would
        encode plain text to a special token.
    """
    missing = [t for t in markup.SPECIAL_TOKENS if hf.token_to_id(t) is None]
    if missing:
      logging.info('Tokenizer lacks %s: added at the end.', ' '.join(missing))
    hf.add_special_tokens(list(markup.SPECIAL_TOKENS))
    hf.no_truncation()
    hf.no_padding()
    self._hf = hf
    self._bytes = _token_bytes(hf)
    self._plain = _without_special_tokens(hf)
    self.special_ids = {t: hf.token_to_id(t) for t in markup.SPECIAL_TOKENS}
    ids = self.special_ids
    self.bos_id, self.role_id = ids[markup.BOS], ids[markup.ROLE]
    self.eos_id = ids[markup.EOS]
    self.think_id, self.think_end_id = ids[markup.THINK], ids[markup.THINK_END]
    self.tool_call_id = ids[markup.TOOL_CALL]
    self.tool_call_end_id = ids[markup.TOOL_CALL_END]
    self.vocab_size = len(self._bytes)
    self._cached = functools.lru_cache(_CACHED_TEXTS)(self._encode_plain)
    for token in markup.SPECIAL_TOKENS:
      if not set(ids.values()).isdisjoint(self._encode_plain(token)):
        raise ValueError(
          f'this tokenizer encodes the plain text {token!r} to a special token, so any '
          'user could write one; use a model that splits it'
        )

  def encode(self, text: str, special: bool = True) -> list[int]:
    """Token ids of a text.

    Args:
      text: any text that UTF-8 can write.
      special: read special tokens in it: only for trusted text. False encodes them as
        the plain text they are.

    Raises:
      ValueError: the text holds a lone surrogate.
    """
    if not special:
      if len(text) <= _CACHED_TEXT_CHARS:
        return list(self._cached(text))
      return list(self._encode_plain(text))
    return _ids(self._hf, text)

  def decode(self, ids: Iterable[int]) -> str:
    """Text of ids, special tokens as their text; broken UTF-8 becomes U+FFFD."""
    return self.decode_bytes(ids).decode('utf-8', 'replace')

  def decode_bytes(self, ids: Iterable[int]) -> bytes:
    """Bytes of ids; an id outside the vocabulary is U+FFFD."""
    table = self._bytes
    size = len(table)
    return b''.join(table[i] if 0 <= i < size else _UNKNOWN for i in ids)

  def save(self, path: str | os.PathLike) -> None:
    """Writes a `tokenizer.json`; a directory gets one inside."""
    path = os.fspath(path)
    self._hf.save(os.path.join(path, _FILE) if os.path.isdir(path) else path)

  def _encode_plain(self, text: str) -> tuple[int, ...]:
    return tuple(_ids(self._plain, text))


_FILE = 'tokenizer.json'


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
  """Trains a byte-level BPE of exactly `vocab_size` tokens; see `bpe.train`."""
  return Tokenizer(bpe.train(texts, vocab_size))


def load(path: str | os.PathLike) -> Tokenizer:
  """Loads any Hugging Face `tokenizer.json`, by file or by directory.

  Raises:
    FileNotFoundError: there is none.
    ValueError: the file is not one, or see `Tokenizer`.
  """
  path = os.fspath(path)
  if os.path.isdir(path):
    path = os.path.join(path, _FILE)
  if not os.path.isfile(path):
    raise FileNotFoundError(f'no tokenizer at {path}: give a {_FILE} or its directory')
  try:
    hf = tokenizers.Tokenizer.from_file(path)
  except Exception as error:  # the library raises bare Exception
    raise ValueError(f'{path} is not a Hugging Face {_FILE}: {error}') from error
  return Tokenizer(hf)


class EncodedChat(NamedTuple):
  """Token ids of a chat, and for each whether the model owns it."""

  ids: list[int]
  owned: list[bool]


def encode_chat(tokenizer: Tokenizer, segments: Iterable[Segment]) -> EncodedChat:
  """Encodes `chat.segments`: the one way from a chat to ids, for gateway and SFT.

  Special pieces become their id. Neighbouring plain pieces of one owner are encoded as
  one text, so only the border between prompt and response forces a cut, exactly where
  generation starts.
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
  """Decodes ids as they come, holding back bytes of an unfinished character.

  The pieces joined, `flush` included, equal `Tokenizer.decode` of all ids.
  """

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    self._utf8 = codecs.getincrementaldecoder('utf-8')('replace')

  def push(self, ids: Iterable[int]) -> str:
    """Text that is complete after these ids; may be empty."""
    return self._utf8.decode(self._tokenizer.decode_bytes(ids))

  def flush(self) -> str:
    """Ends the text: an unfinished character becomes U+FFFD."""
    return self._utf8.decode(b'', final=True)


def _ids(hf: tokenizers.Tokenizer, text: str) -> list[int]:
  try:
    return hf.encode(text, add_special_tokens=False).ids
  except TypeError:
    try:
      text.encode()
    except UnicodeEncodeError as error:
      raise ValueError(
        f'text holds a lone surrogate at character {error.start}: not valid Unicode'
      ) from None
    raise


def _without_special_tokens(hf: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
  """The same tokenizer, reading special tokens as plain text."""
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
  kinds = set(_decoder_kinds(spec['decoder']))
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


def _decoder_kinds(decoder: dict | None) -> Iterator[str]:
  if decoder is None:
    return
  yield decoder['type']
  for part in decoder.get('decoders', ()):
    yield from _decoder_kinds(part)


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
