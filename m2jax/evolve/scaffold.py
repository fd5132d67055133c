"""A scaffold: what of the white-box agent evolution may edit, with its bounds.

A scaffold is a folder of at most two files. `scaffold.json` has the fields of
`FIELDS`, nested by their dots, and `"schema": 1`; `rules.py`, optional, is code behind
the interface of `agents.rules`. In memory it is flat: field → value, with the source of
rules.py as the field 'rules'. Everything else (the number of turns, the tasks, the
seeds, the evaluator, the budgets) is no field, and cannot be set.

A job may narrow the bounds (`narrowed`), never widen them.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
import pathlib
import reprlib
import stat
from collections.abc import Mapping, Sequence
from typing import Any

from m2jax.agents import context, loops
from m2jax.agents.whitebox import WhiteboxConfig
from m2jax.evolve import rules_check

SCHEMA = 1
FILES = JSON, RULES = 'scaffold.json', 'rules.py'
_FILE_BYTES = 64 << 10


@dataclasses.dataclass(frozen=True)
class Number:
  """A number in [low, high]. `optional`: or null."""

  low: float
  high: float
  whole: bool = False
  optional: bool = False

  def problem(self, value: Any) -> str:
    """Why a value is not within the bound, or ''."""
    if value is None and self.optional:
      return ''
    kinds = (int,) if self.whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
      return 'must be a whole number' if self.whole else 'must be a number'
    if not self.low <= value <= self.high:
      return f'must be in [{self.low:g}, {self.high:g}]'
    return ''


@dataclasses.dataclass(frozen=True)
class Choice:
  """One of several texts."""

  values: tuple[str, ...]

  def problem(self, value: Any) -> str:
    """See `Number.problem`."""
    return '' if value in self.values else f'must be one of {list(self.values)}'


@dataclasses.dataclass(frozen=True)
class Subset:
  """A list of some of several texts, each once."""

  values: tuple[str, ...]

  def problem(self, value: Any) -> str:
    """See `Number.problem`."""
    ok = isinstance(value, (list, tuple)) and all(v in self.values for v in value)
    if ok and len(set(value)) == len(value):
      return ''
    return f'must be a list of some of {list(self.values)}, each once'


@dataclasses.dataclass(frozen=True)
class Text:
  """A text of up to `characters`. `optional`: or null."""

  characters: int
  contains: str = ''
  optional: bool = False

  def problem(self, value: Any) -> str:
    """See `Number.problem`."""
    if value is None and self.optional:
      return ''
    if not isinstance(value, str) or not _encodes(value):
      return 'must be a text'
    if len(value) > self.characters:
      return f'must have at most {self.characters} characters'
    return '' if self.contains in value else f'must contain {self.contains!r}'


@dataclasses.dataclass(frozen=True)
class Texts:
  """An object of up to `entries` texts."""

  entries: int
  characters: int

  def problem(self, value: Any) -> str:
    """See `Number.problem`."""
    if not isinstance(value, Mapping) or len(value) > self.entries:
      return f'must be an object of at most {self.entries} texts'
    for key, text in value.items():
      if not isinstance(key, str) or len(key) > 64 or not _encodes(key):
        return 'must have keys of at most 64 characters'
      if problem := Text(self.characters).problem(text):
        return f'{reprlib.repr(key)}: {problem}'
    return ''


Bound = Number | Choice | Subset | Text | Texts

# Sampling fields are those that the engine supports (`rollout.api.SamplingParams`); a
# seed is not among them. The values of the other fields are those of `WhiteboxConfig`.
FIELDS: Mapping[str, Bound] = {
  'system': Text(4000, optional=True),
  'instruction': Text(2000, contains='{instruction}'),
  'descriptions': Texts(32, 600),
  'rename': Texts(32, 64),
  'max_tokens': Number(1, 8192, whole=True),
  'observation_bytes': Number(64, 16384, whole=True),
  'sampling.temperature': Number(0, 2),
  'sampling.top_p': Number(0.05, 1),
  'sampling.top_k': Number(0, 1000, whole=True),
  'sampling.min_p': Number(0, 0.5),
  'sampling.repetition_penalty': Number(0.5, 2),
  'sampling.frequency_penalty': Number(-1, 2),
  'sampling.presence_penalty': Number(-1, 2),
  'context.policy': Choice(context.POLICIES),
  'context.actions': Subset(tuple(context.ACTIONS)),
  'context.tokens': Number(0, 1 << 18, whole=True),
  'context.threshold': Number(0.25, 1),
  'context.keep_turns': Number(0, 16, whole=True),
  'context.keep_first': Number(0, 8, whole=True),
  'context.notes_tokens': Number(16, 512, whole=True),
  'context.max_edits': Number(0, 16, whole=True),
  'context.thinking': Choice(('keep', 'drop')),
  'retry.malformed': Number(0, 4, whole=True),
  'retry.length': Number(0, 4, whole=True),
  'retry.most': Number(0, 16, whole=True),
  'retry.temperature': Number(0, 2, optional=True),
  'loops.identical': Number(0, 8, whole=True),
  'loops.errors': Number(0, 8, whole=True),
  'loops.alternating': Number(0, 12, whole=True),
  'loops.reaction': Choice(loops.REACTIONS),
  'loops.message': Text(600),
  'loops.temperature': Number(0, 2),
  'loops.most': Number(0, 16, whole=True),
  'rules': Text(16000),
}
# Values of sampling fields that are off. The first three are those of evaluations.
_SAMPLING = {
  'temperature': 1.0,
  'top_p': 1.0,
  'top_k': 0,
  'min_p': 0.0,
  'repetition_penalty': 1.0,
  'frequency_penalty': 0.0,
  'presence_penalty': 0.0,
}


class InvalidScaffold(ValueError):
  """A scaffold is outside the edit surface; the message has every reason."""


def narrowed(ranges: Sequence[tuple[str, float, float]]) -> dict[str, Bound]:
  """The bounds with narrower ranges of numbers, given as (field, low, high).

  Raises:
    ValueError: a field is no number, or its range is not within the bound.
  """
  found = dict(FIELDS)
  for name, low, high in ranges:
    bound = FIELDS.get(name)
    if not isinstance(bound, Number) or not bound.low <= low <= high <= bound.high:
      raise ValueError(f'bounds.{name}={(low, high)}: no range within {bound}')
    found[name] = dataclasses.replace(bound, low=low, high=high)
  return found


@dataclasses.dataclass(frozen=True)
class Scaffold:
  """A scaffold; `values` has every field of `FIELDS`."""

  values: Mapping[str, Any]

  def changed(self, changes: Mapping[str, Any]) -> Scaffold:
    """The scaffold with other values; not checked (`problems`)."""
    return Scaffold({**self.values, **changes})

  def agent(self, base: WhiteboxConfig) -> WhiteboxConfig:
    """The agent's config; what no scaffold sets is that of `base`.

    Raises:
      ValueError: fields contradict each other.
    """
    nested = _nested(self.values)
    groups = {
      name: dataclasses.replace(getattr(base, name), **nested.pop(name))
      for name in ('context', 'retry', 'loops')
    }
    actions = tuple(groups['context'].actions)
    groups['context'] = dataclasses.replace(groups['context'], actions=actions)
    return dataclasses.replace(base, **nested, **groups)

  @property
  def digest(self) -> str:
    """A hash that whitespace, comments, order and number types do not change."""
    values = {**self.values, 'rules': rules_check.normalised(self.values['rules'])}
    text = json.dumps(_plain(values), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

  def files(self) -> dict[str, str]:
    """The folder: name → text."""
    nested = _nested(self.values)
    rules = nested.pop('rules')
    text = json.dumps({'schema': SCHEMA, **nested}, indent=2, sort_keys=True)
    return {JSON: text + '\n'} | ({RULES: rules} if rules else {})

  def write(self, folder: pathlib.Path) -> None:
    """Writes the folder; removes a rules.py that the scaffold does not have."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RULES).unlink(missing_ok=True)
    for name, text in self.files().items():
      (folder / name).write_text(text)


def of_agent(config: WhiteboxConfig) -> Scaffold:
  """The scaffold that is an agent as it is; its sampling is that of evaluations."""
  sampling = _SAMPLING | dict(config.sampling)
  values = {}
  for name in FIELDS:
    group, _, field = name.rpartition('.')
    if group == 'sampling':
      values[name] = sampling[field]
    else:
      values[name] = getattr(getattr(config, group) if group else config, field)
  return Scaffold(_plain(values))


def problems(
  values: Mapping[str, Any], bounds: Mapping[str, Bound] = FIELDS
) -> list[str]:
  """Why values are not within the edit surface: one line each, with the field."""
  found = [
    f'{reprlib.repr(name)}: no field of a scaffold'
    for name in values
    if name not in FIELDS
  ]
  for name, bound in bounds.items():
    if name not in values:
      found.append(f'{name}: missing')
    elif problem := bound.problem(values[name]):
      found.append(f'{name}={reprlib.repr(values[name])}: {problem}')
  if not found:
    found += [
      f'rules.py: {problem}' for problem in rules_check.problems(values['rules'])
    ]
    try:
      Scaffold(values).agent(WhiteboxConfig())
    except (TypeError, ValueError) as error:
      found.append(str(error))
  return found


def read(folder: pathlib.Path, bounds: Mapping[str, Bound] = FIELDS) -> Scaffold:
  """Reads a folder.

  Raises:
    InvalidScaffold: a file is missing, unreadable or too much, or a value is outside
      its bound.
  """
  texts, found = {}, []
  try:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
      if entry.name == '.git':
        continue
      state = entry.stat(follow_symlinks=False)
      if entry.name not in FILES or not stat.S_ISREG(state.st_mode):
        found.append(f'{reprlib.repr(entry.name)}: no file of a scaffold')
      elif state.st_size > _FILE_BYTES:
        found.append(f'{entry.name}: more than {_FILE_BYTES} bytes')
      else:
        texts[entry.name] = pathlib.Path(entry.path).read_text()
  except (OSError, UnicodeDecodeError) as error:
    found.append(str(error))
  if JSON not in texts and not found:
    found.append(f'{JSON}: missing')
  if found:
    raise InvalidScaffold(f'{folder}: {"; ".join(found)}')
  try:
    nested = json.loads(texts[JSON])
  except (ValueError, RecursionError) as error:
    raise InvalidScaffold(f'{folder}/{JSON}: {error}') from error
  if not isinstance(nested, dict) or nested.pop('schema', None) != SCHEMA:
    raise InvalidScaffold(f'{folder}/{JSON}: must be an object with "schema": {SCHEMA}')
  values = flat(nested) | {'rules': texts.get(RULES, '')}
  if 'rules' in nested or (found := problems(values, bounds)):
    raise InvalidScaffold(f'{folder}: {"; ".join(found or ["rules: is a file"])}')
  return Scaffold(values)


def diff(old: Scaffold, new: Scaffold) -> str:
  """A unified diff of the folders."""
  before, after = old.files(), new.files()
  lines: list[str] = []
  for name in FILES:
    texts = before.get(name, ''), after.get(name, '')
    a, b = (text.splitlines(keepends=True) for text in texts)
    lines += difflib.unified_diff(a, b, f'a/{name}', f'b/{name}', n=1)
  return ''.join(line if line.endswith('\n') else line + '\n' for line in lines)


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
  nested: dict[str, Any] = {}
  for name, value in values.items():
    group, _, field = name.rpartition('.')
    (nested.setdefault(group, {}) if group else nested)[field] = value
  return nested


def flat(nested: Mapping[str, Any]) -> dict[str, Any]:
  """Field → value of scaffold.json's groups; unknown fields stay as they are."""
  groups = {name.partition('.')[0] for name in FIELDS if '.' in name}
  flat = {}
  for name, value in nested.items():
    if name in groups and isinstance(value, dict):
      flat |= {f'{name}.{field}': v for field, v in value.items()}
    else:
      flat[name] = value
  return flat


def _plain(value: Any) -> Any:
  """A value as JSON gives it back; 1.0 is 1."""
  if isinstance(value, Mapping):
    return {key: _plain(v) for key, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [_plain(v) for v in value]
  if isinstance(value, float) and value.is_integer():
    return int(value)
  return value


def _encodes(text: str) -> bool:
  try:
    return '\0' not in text and bool(text.encode() or True)
  except UnicodeEncodeError:
    return False
