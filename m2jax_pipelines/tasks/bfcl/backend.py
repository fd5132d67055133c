"""The tools of one BFCL episode: a program that reads and writes JSON lines.

`python -m m2jax_pipelines.tasks.bfcl.backend NUMBER`, limited in time and memory by
itself.

    {"call": NAME, "arguments": {…}}  →  {"shown": TEXT, "error": bool}
    {"end_turn": true}                →  {"turn": n, "valid": bool, "reason": TEXT}

Only methods that the entry's documents list can be called, with keyword arguments; no
text is evaluated. Each call is first tried in a forked process with its own limits: a
call that exceeds them is an error and changes nothing. The verdict follows
multi_turn_checker.py of bfcl-eval 2026.3.23: at the end of a turn every public
attribute equals that of instances on which the reference calls ran, each result of the
turn's reference calls is among all results so far, and a turn with reference calls has
calls.
"""

from __future__ import annotations

import ast
import copy
import importlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from m2jax_pipelines.tasks.bfcl import data

_SOURCE = 'bfcl_eval.eval_checker.multi_turn_eval.func_source_code'
_CPU_S, _MEMORY_BYTES = 600, 1 << 30
_CALL_CPU_S, _CALL_S = 2, 5.0
_MAX_SHOWN = 1 << 18  # characters
_TOO_MUCH = 'Error during execution: the call takes too much time or memory'


class Instances:
  """The entry's objects, on which calls run."""

  def __init__(self, entry: Mapping[str, Any]):
    self.objects = {name: _instance(name, entry) for name in entry['involved_classes']}
    self._methods: dict[str, Callable] = {}
    for name, value in self.objects.items():
      del name
      for method in dir(value):
        if not method.startswith('_') and callable(getattr(value, method)):
          self._methods[method] = getattr(value, method)

  def run(self, name: str, /, *arguments: Any, **keywords: Any) -> str:
    """The result as BFCL shows it; an error is a result too."""
    try:
      result = self._methods[name](*arguments, **keywords)
      if isinstance(result, str):
        return result
      return json.dumps(result) if isinstance(result, dict) else str(result)
    except Exception as error:
      return f'Error during execution: {error}'

  def differences(self, other: Instances) -> list[str]:
    """Names of public attributes that differ from the reference's."""
    return [
      f'{name}.{attribute}'
      for name, reference in other.objects.items()
      for attribute, value in vars(reference).items()
      if not attribute.startswith('_')
      and getattr(self.objects[name], attribute) != value
    ]


def _instance(name: str, entry: Mapping[str, Any]) -> Any:
  module = importlib.import_module(f'{_SOURCE}.{data.MODULES[name]}')
  made = getattr(module, name)()
  if name not in data.STATELESS:
    made._load_scenario(copy.deepcopy(entry['initial_config'].get(name, {})))
  return made


class Episode:
  """The agent's instances beside the reference's."""

  def __init__(self, entry: Mapping[str, Any]):
    self._entry = entry
    self._agent, self._reference = Instances(entry), Instances(entry)
    self._names = {tool['function']['name'] for tool in data.tools(entry)}
    self._results: list[str] = []
    self._calls, self._turn = 0, 0  # calls of this turn

  def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Runs a call of the agent."""
    if name not in self._names:
      return {'shown': f'no tool {name!r}', 'error': True}
    bounded = within_limits(lambda: self._agent.run(name, **arguments))
    shown = self._agent.run(name, **arguments) if bounded else _TOO_MUCH
    self._calls += 1
    self._results.append(shown)
    return {'shown': shown, 'error': False}

  def end_turn(self) -> dict[str, Any]:
    """Judges the turn, and begins the next."""
    reference = self._entry['ground_truth'][self._turn]
    expected = [
      self._reference.run(name, *a, **k) for name, a, k in map(_call, reference)
    ]
    reason = ''
    if reference:
      left = list(self._results)
      missing = [e for e in expected if not (e in left and not left.remove(e))]
      different = self._agent.differences(self._reference)
      if not self._calls:
        reason = 'no call'
      elif different:
        reason = f'state differs: {", ".join(different)}'
      elif missing:
        reason = f'{len(missing)} results are missing'
    self._turn, self._calls = self._turn + 1, 0
    return {'turn': self._turn, 'valid': not reason, 'reason': reason}


def within_limits(call: Callable[[], str]) -> bool:
  """Whether a call ends within its limits: tried in a process forked from this one."""
  child = os.fork()
  if not child:
    try:
      resource.setrlimit(resource.RLIMIT_CPU, (_CALL_CPU_S, _CALL_CPU_S))
      os._exit(len(call()) > _MAX_SHOWN)
    finally:
      os._exit(1)
  deadline = time.monotonic() + _CALL_S
  while True:
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
      return not status
    if time.monotonic() > deadline:
      os.kill(child, signal.SIGKILL)
      os.waitpid(child, 0)
      return False
    time.sleep(0.001)


def _call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
  """(name, arguments, keywords) of a reference call, whose arguments are literals."""
  node = ast.parse(text.strip(), mode='eval').body
  keywords = {k.arg: ast.literal_eval(k.value) for k in node.keywords}
  return node.func.id, [ast.literal_eval(a) for a in node.args], keywords


def main(number: int) -> None:
  """Serves one episode."""
  out, sys.stdout = sys.stdout, sys.stderr  # tools print
  episode = Episode(data.entries()[number])
  resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
  resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
  for line in sys.stdin:
    request = json.loads(line)
    if 'call' in request:
      answer = episode.call(request['call'], request['arguments'])
    else:
      answer = episode.end_turn()
    out.write(json.dumps(answer) + '\n')
    out.flush()


if __name__ == '__main__':
  main(int(sys.argv[1]))
