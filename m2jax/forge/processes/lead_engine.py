"""The rollout engine over several processes: the calls of process 0, made by all.

Process 0 has scheduler, gateway and tasks, and makes every call on the engine from one
thread. Each is sent to the other processes before (`commands`), by its name and with
its host arrays, a few kilobytes; they make the same call on the same mesh. Weights are
not sent: all processes have read them, and a call names them by a number
(`lead_weights`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from m2jax.forge.errors import Stopped
from m2jax.forge.processes.commands import Commands
from m2jax.forge.processes.lead_weights import Numbers
from m2jax.rollout.api import EngineLost
from m2jax.rollout.engine.decode_state import DecodeState, Drafted, Sampled, Slots
from m2jax.rollout.engine.engine import Engine


class LeadEngine:
  """What a scheduler calls of an `Engine`, made by all processes.

  Attributes:
    cfg, config, groups: the engine's.
    moves_pages, keeps_contexts: never; no process has whole pages or contexts.
    loads_in_any_thread: never; calls of all processes are in one order.
    waits_for_tokens: always; process 0 reads the tokens within the call.
    lost: whether a call has failed, so that no other will succeed.
  """

  moves_pages = keeps_contexts = loads_in_any_thread = False
  waits_for_tokens = True

  def __init__(self, engine: Engine, commands: Commands, numbers: Numbers):
    """`numbers`: of the weights that the other processes have, too."""
    self._engine, self._commands, self._numbers = engine, commands, numbers
    self.cfg, self.config, self.groups = engine.cfg, engine.config, engine.groups
    self.lost = False

  def load_params(self, params: Any) -> Any:
    """Places weights; raises LookupError if not all processes have read them."""
    *_, placed = self.load_parts(params)
    return placed

  def load_parts(self, params: Any, part_bytes: int = 2**62) -> Iterator[Any]:
    """Places weights in parts: None for each, and the weights after the last.

    Raises:
      LookupError: not all processes have read these weights.
    """
    number = self._numbers.of(params)
    parts = self._engine.load_parts(params, part_bytes)
    with self._all('load_parts', number=number, part_bytes=part_bytes):
      pass
    placed = None
    while placed is None:
      with self._all('load_part'):
        placed = next(parts)
      yield placed

  def init_decode_state(self) -> DecodeState:
    """Slots and pages without sequences."""
    with self._all('init_decode_state'):
      return self._engine.init_decode_state()

  def warmup(self, params: Any, state: DecodeState) -> DecodeState:
    """Compiles what the other calls need."""
    with self._all('warmup'):
      state = self._engine.warmup(params, state)
    self._commands.forget()  # it needed all processes
    return state

  def prefill_rows(self, params, state, *arrays) -> DecodeState:
    """Computes tokens of prompts."""
    with self._all('prefill_rows', arrays):
      return self._engine.prefill_rows(params, state, *arrays)

  def admit(self, state, *arrays) -> DecodeState:
    """Begins to decode in slots."""
    with self._all('admit', arrays):
      return self._engine.admit(state, *arrays)

  def generate_many(self, params, state, *arrays) -> tuple[DecodeState, Sampled]:
    """Draws the next tokens of all slots."""
    return self._generate('generate_many', params, state, arrays)

  def generate_masked(self, params, state, *arrays) -> tuple[DecodeState, Sampled]:
    """Draws the next token of all slots, where a mask allows it."""
    return self._generate('generate_masked', params, state, arrays)

  def _generate(self, name, params, state, arrays) -> tuple[DecodeState, Sampled]:
    with self._all(name, arrays):
      state, sampled = getattr(self._engine, name)(params, state, *arrays)
      sampled = jax.device_get(sampled)
    self._commands.forget()  # the tokens needed all processes
    return state, sampled

  def speculate(
    self, params, state, drafts, *arrays
  ) -> tuple[DecodeState, Sampled, Drafted]:
    """Checks drafts, and draws the tokens after them and new drafts."""
    with self._all('speculate', (drafts, *arrays)):
      state, *found = self._engine.speculate(params, state, drafts, *arrays)
      found = jax.device_get(found)
    self._commands.forget()
    return state, *found

  def expert_ids(self, state, *arrays) -> np.ndarray:
    """The experts of sequences' tokens, on the host."""
    with self._all('expert_ids', arrays):
      return jax.device_get(self._engine.expert_ids(state, *arrays))

  @contextlib.contextmanager
  def _all(self, name: str, arrays: Sequence[Any] = (), **fields) -> Iterator[None]:
    """The other processes make the call of the body; the fields are JSON-able.

    Raises:
      EngineLost: the call failed here or one of them has failed: whether the others
        have made it is unknown.
    """
    try:
      self._commands.send(name, _named(arrays), **fields)
      yield
    except Stopped as error:
      self.lost = True
      raise EngineLost(str(error)) from error
    except jax.errors.JaxRuntimeError as error:
      self.lost = True
      raise EngineLost(_failed(name, error)) from error


def follow(engine: Engine, weights: Callable[[int], Any], commands: Commands) -> None:
  """Makes the calls of process 0 until it stops.

  Args:
    engine: an engine with the same sizes and mesh.
    weights: this process's weights of a number of process 0's `Numbers`.
    commands: the channel from process 0.

  Raises:
    Stopped: process 0 stopped before its end, or a call failed; gives the reason.
  """
  variables = parts = state = None
  while (command := commands.receive()).kind != 'stop':
    name, fields, arrays = command.kind, command.fields, _in_order(command.arrays)
    try:
      match name:
        case 'load_parts':
          parts = engine.load_parts(weights(fields['number']), fields['part_bytes'])
        case 'load_part':
          if (placed := next(parts)) is not None:
            variables, parts = placed, None  # they have the weights as they were read
        case 'init_decode_state':
          state = engine.init_decode_state()
        case 'warmup':
          state = engine.warmup(variables, state)
        case 'prefill_rows':
          state = engine.prefill_rows(variables, state, *arrays)
        case 'admit':
          state = engine.admit(state, *arrays)
        case 'generate_many' | 'generate_masked':
          state, _ = getattr(engine, name)(variables, state, *arrays)
        case 'speculate':
          state, *_ = engine.speculate(variables, state, *arrays)
        case 'expert_ids':
          engine.expert_ids(state, *arrays)
        case _:
          raise ValueError(f'process 0 sent a command {name!r}: is it another version?')
    except jax.errors.JaxRuntimeError as error:
      raise Stopped(_failed(name, error)) from error


def _failed(name: str, error: Exception) -> str:
  first = str(error).strip().partition('\n')[0]
  return (
    f'{name}, a call of all {jax.process_count()} processes, failed; has one of them '
    f'ended? ({first})'
  )


def _named(values: Sequence[Any]) -> dict[str, Any]:
  """Host arrays, or a Slots of them, by their places among the arguments."""
  named = {}
  for i, value in enumerate(values):
    if isinstance(value, Slots):
      named |= {f'{i}.{name}': array for name, array in vars(value).items()}
    else:
      named[f'{i}'] = value
  return named


def _in_order(named: Mapping[str, np.ndarray]) -> list[Any]:
  """The inverse of `_named`."""
  values: dict[str, Any] = {}
  for name, array in named.items():
    place, _, field = name.partition('.')
    if field:
      values.setdefault(place, {})[field] = array
    else:
      values[place] = array
  return [Slots(**x) if isinstance(x, dict) else x for x in values.values()]
