"""What a response must be: content of a JSON schema, or a call of one of some tools.

Each dialect has its own form of both (`of` reads what they have in common, `tool_call`
is for `tool_choice`); the engine gets a grammar (`serving.grammars`). It bends the
sampled distribution, so that training sessions refuse it. The schema does not become
part of the prompt: the client describes what it wants there, as with the real services.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
from collections.abc import Iterable
from typing import Any

from m2jax.gateway import fields, schemas
from m2jax.gateway.errors import invalid, unsupported
from m2jax.rollout.api import Grammar
from m2jax.rollout.serving import grammars
from m2jax.text.tokenizer import Tokenizer

MAX_SCHEMA_CHARACTERS = 64 << 10


@dataclasses.dataclass(frozen=True)
class Format:
  """A checked format.

  Attributes:
    schema: schema of the content: an object, not yet known to be a schema; None: no
      content.
    field: its place in the body.
    tools: names of the tools of which one must be called.
  """

  schema: dict[str, Any] | None
  field: str
  tools: tuple[str, ...] = ()


def of(value: Any, where: str, nested: str | None = None) -> Format | None:
  """The format of a field {'type': …, 'schema': …}; None is text.

  Args:
    nested: the field that contains the schema, if it is one level deeper.

  Raises:
    ApiError: 400, names the field.
  """
  kind = fields.mapping(value, where).get('type')
  if kind == 'text':
    return None
  if kind == 'json_object':
    return Format(schemas.ANY_OBJECT, where)
  if kind != 'json_schema':
    raise unsupported("must be 'text', 'json_object' or 'json_schema'", f'{where}.type')
  if nested:
    where = f'{where}.{nested}'
    value = fields.mapping(value.get(nested), where)
  where = f'{where}.schema'
  schema = fields.mapping(value.get('schema'), where)
  if len(json.dumps(schema)) > MAX_SCHEMA_CHARACTERS:
    raise invalid(f'must have at most {MAX_SCHEMA_CHARACTERS} characters', where)
  return Format(schema, where)


def field(nested: str | None = None) -> fields.Field:
  """A field with a format, of which the OpenAPI document names 'text' only."""
  shown = schemas.input_('type', type=schemas.constant('text'))
  return fields.Field(shown, functools.partial(of, nested=nested))


def tool_call(tools: Iterable[dict]) -> Format:
  """The format of a response that calls one of some tools, for 'tool_choice'."""
  names = (tool['function']['name'] for tool in tools)
  return Format(None, 'tool_choice', tuple(names))


class Formats:
  """Compiles formats for a tokenizer; llguidance is imported with the first.

  Some small schemas take minutes (`multipleOf` of a large number): a reader process has
  compiled each format once, within its time and memory, before the gateway's does.
  """

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    self._compiler: grammars.Compiler | None = None

  async def grammar(
    self, format_: Format | None, *, calls: bool, training: bool
  ) -> Grammar | None:
    """The grammar of a response; compiled in a thread.

    Args:
      calls: whether the response may be tool calls instead.

    Raises:
      ApiError: 400, in a training session, or for a schema that does not compile.
    """
    if format_ is None:
      return None
    if training:
      raise unsupported(
        'would bend the sampled distribution of a training session; omit it',
        format_.field,
      )
    return await asyncio.to_thread(self.compile, format_, calls)

  def compile(self, format_: Format, calls: bool) -> Grammar:
    """The grammar. Raises ApiError: 400, the schema does not compile."""
    tokenizer = self._tokenizer
    ids = tokenizer.tool_call_id, tokenizer.tool_call_end_id
    if format_.schema is None:
      grammar = grammars.tool_call(format_.tools, ids)
    else:
      grammar = grammars.json_response(format_.schema, ids if calls else None)
    try:
      if self._compiler is None:
        self._compiler = grammars.Compiler(tokenizer)
      return self._compiler.compile(grammar)
    except ImportError as error:
      raise unsupported(str(error), format_.field) from error
    except grammars.InvalidGrammar as error:
      raise invalid(f'cannot be compiled: {error}', format_.field) from error
