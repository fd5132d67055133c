"""Where the rollout engine's time goes: Python, dispatch, parts of the device's time.

  python -m benchmarks.rollout_profile [--requests=64]

Plays the workloads of `benchmarks.rollout` on its model, a batch of --requests and the
agents' sessions, and prints a Markdown table of the engine thread's time: waiting for
the device in decode and in prefill calls, dispatching calls, and the rest, which is
Python. Another run under JAX's profiler divides the device's time in decode calls by
the scopes of the program (attention, experts, sampling, copies of contexts); with
several virtual devices it is their sum. `exchange` is the collectives of all scopes, in
which a device also waits for the others; `no operation` is a lower bound on the share
of the devices' time in that run's decode calls without any operation (operations of one
device may overlap).
"""

from __future__ import annotations

import collections
import gzip
import json
import pathlib
import re
import tempfile
import time
from collections.abc import Callable

import jax
from absl import app, flags

from benchmarks import harness, rollout_worker, rollout_workload
from m2jax import startup

_REQUESTS = flags.DEFINE_integer('requests', 64, 'of a batch', lower_bound=1)
_TURNS = flags.DEFINE_integer('turns', 30, 'of each agent', lower_bound=1)

CALLS = {
  'prefill_rows': 'prefill',
  'admit': 'admit',
  'generate_kept': 'decode',
  'generate_many': 'decode',
  'generate_masked': 'decode',
}
SCOPES = ('attention', 'moe', 'sampling', 'contexts')
EXCHANGE = re.compile(
  r'all[-_](to[-_]all|gather|reduce)|collective|reduce[-_]scatter|psum'
)
_CONTROL = re.compile(r'^(while|call|conditional|fusion-)')  # their parts count


class Timed:
  """An engine whose calls end before they return, and are measured.

  Attributes:
    seconds: total time, by ('dispatch' or 'device', kind of call).
    programs: the compiled text of each decode call, by its arguments' shapes.
  """

  def __init__(self, engine):
    self._engine = engine
    self.seconds: collections.Counter = collections.Counter()
    self.programs: dict[str, Callable[[], str]] = {}

  def __getattr__(self, name: str):
    found = getattr(self._engine, name)
    return self._timed(name, found) if name in CALLS else found

  def _timed(self, name: str, call: Callable) -> Callable:
    def run(*arguments):
      if CALLS[name] == 'decode':
        shapes = jax.tree.map(_shape, arguments)
        key = str(jax.tree.leaves(shapes[2:]))
        if key not in self.programs:
          self.programs[key] = lambda: call.lower(*shapes).compile().as_text()
      begin = time.perf_counter()
      out = call(*arguments)
      dispatched = time.perf_counter()
      jax.block_until_ready(out)
      self.seconds['dispatch', CALLS[name]] += dispatched - begin
      self.seconds['device', CALLS[name]] += time.perf_counter() - dispatched
      return out

    return run


def _shape(x):
  sharding = x.sharding if isinstance(x, jax.Array) else None
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def scopes(text: str) -> dict[str, str]:
  """The scope of each operation of a compiled program; 'other' if it has none."""
  found = {}
  for name, op_name in re.findall(r'%?([\w.\-]+) = .*?op_name="([^"]*)"', text):
    path = re.split(r'[/()]', op_name)
    found[name] = next((scope for scope in SCOPES if scope in path), 'other')
  return found


def device_shares(directory: str, timed: Timed) -> dict[str, float]:
  """Shares of the operations' time in decode calls, by scope; and of collectives.

  Also returns a lower bound on the share of the devices' time without an operation.
  """
  scope_of: dict[str, str] = {}
  for program in timed.programs.values():
    scope_of |= scopes(program())
  (path,) = pathlib.Path(directory).glob('**/*.trace.json.gz')
  with gzip.open(path) as file:
    events = json.load(file)['traceEvents']
  total: collections.Counter = collections.Counter()
  exchanged = 0.0
  for event in events:
    arguments = event.get('args', {})
    name = arguments.get('hlo_op', '')
    if 'generate' in arguments.get('hlo_module', '') and not _CONTROL.match(name):
      total[scope_of.get(name, 'other')] += event.get('dur', 0)
      exchanged += event.get('dur', 0) if EXCHANGE.search(name) else 0
  whole = total.total() or 1
  shares = {scope: total[scope] / whole for scope in (*SCOPES, 'other')}
  devices_s = timed.seconds['device', 'decode'] * jax.device_count()
  return shares | {
    'exchange': exchanged / whole,
    'no operation': max(0.0, 1 - 1e-6 * whole / devices_s),
  }


def profile(server: rollout_worker.Server, run: Callable[[], dict]) -> dict[str, float]:
  """Seconds by part of a second run, and device shares of a third, as `… of decode`.

  The server's engine is `Timed`.
  """
  timed = server.engine

  def busy_s():
    time.sleep(0.2)  # a tick is counted after it has given out its results
    return server.scheduler.stats()['busy_s']

  run()
  before = busy_s()
  timed.seconds.clear()
  begin = time.perf_counter()
  run()
  seconds = time.perf_counter() - begin
  busy = busy_s() - before
  spent = collections.Counter(timed.seconds)
  timed.seconds.clear()
  with tempfile.TemporaryDirectory() as directory:
    with jax.profiler.trace(directory):
      run()
    shares = device_shares(directory, timed)
  dispatch = sum(s for (part, _), s in spent.items() if part == 'dispatch')
  parts = {
    'decode calls': spent['device', 'decode'],
    'prefill calls': spent['device', 'prefill'] + spent['device', 'admit'],
    'dispatch': dispatch,
  }
  parts['Python of the engine'] = busy - sum(parts.values())
  parts['no request in work'] = seconds - busy
  of_decode = {f'{scope} of decode': share for scope, share in shares.items()}
  return {'seconds': seconds, **parts, **of_decode}


def table(found: dict[str, dict[str, float]]) -> str:
  """Shares of each workload's time, and of decode calls, in percent."""
  lines = []
  for name in next(iter(found.values())):
    if name == 'seconds':
      cells = [f'{parts[name]:.2f} s' for parts in found.values()]
    elif name.endswith('of decode'):
      cells = [f'{parts[name]:.1%} of these' for parts in found.values()]
    else:
      cells = [f'{parts[name] / parts["seconds"]:.1%}' for parts in found.values()]
    title = name.replace('of decode', 'in decode calls')
    lines.append([title, *cells])
  return harness.markdown(['part', *found], lines)


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  startup.prepare(startup.devices())
  server = rollout_worker.Server(64, look_ahead=False, wrap=Timed)
  sessions = dict(vars(rollout_workload.Sessions(turns=_TURNS.value)))
  requests = dict(requests=_REQUESTS.value, prompt=64, new=64)
  batch = lambda: server.batch(seed=0, **requests)
  agents = lambda: server.sessions(seed=0, **sessions)
  found = {
    f'{_REQUESTS.value} requests': profile(server, batch),
    f'{sessions["count"]} agents': profile(server, agents),
  }
  server.scheduler.stop()
  print(table(found))


if __name__ == '__main__':
  app.run(main)
