"""Grades a tree of SWE-scaling; in each task's tests/, beside harness.py, compose.py.

config.json: {"kind", "roots", "files", "f2p", "p2p", "source", …}. The tests
run in a child (harness.py), whose results come over a pipe with a secret word.
Semantics: facts/pipelines.md §3.4. A test of F2P or P2P counts only if it has exactly
the status of the right solution; one that is missing or skipped fails. So this is
stricter than swebench, which accepts a skipped P2P.

Standard library only. reward.txt is written last, when no other process is left.
"""

import contextlib
import ctypes
import functools
import itertools
import json
import math
import os
import secrets
import select
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile

# A fixed seed, since some tests are named after elements of sets.
_ENVIRONMENT = {'PATH': '/usr/bin:/bin', 'LANG': 'C.UTF-8', 'PYTHONHASHSEED': '0'}
# Names by which a test reads the source instead of calling it.
_READERS = frozenset(
  'open getsource getsourcelines getlines read_text read_bytes linecache tokenize '
  'get_source get_data orig_argv'.split()
)
_HERE = os.path.dirname(os.path.abspath(__file__))
_PR_SET_DUMPABLE = 4
# Those that run tests.
PROGRAMS = tuple(
  'harness.py plugin.py guards.py snapshot.py alone.py processes.py'.split()
)
_ANSWER_S = 30.0  # beyond the limit of a run: its processes are ended


def main():
  """Grades $M2JAX_TREE."""
  with contextlib.suppress(OSError, AttributeError):
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
  import processes

  processes.adopt()
  with open(os.path.join(_HERE, 'config.json')) as file:
    config = json.load(file)
  logs = os.environ.get('M2JAX_LOGS', '/logs/verifier')
  print('m2jax: ready', flush=True)
  try:
    tree = os.environ.get('M2JAX_TREE') or _compose(config)
    found = KINDS[config['kind']](config, tree)
  except Failed as error:
    found = {'reward': 0.0, 'reason': str(error)}
  try:
    processes.end_children()
  except TimeoutError:
    found = {'reward': 0.0, 'reason': 'the tests leave processes that do not end'}
  _write(os.path.join(logs, 'details.json'), json.dumps(found))
  _write(os.path.join(logs, 'reward.txt'), str(found['reward']))


class Failed(Exception):
  """The attempt fails."""


def tests(config, tree):
  """F2P ∧ P2P on the agent's sources."""
  _refuse_reaching(config, tree)
  results = _with_canaries(config, tree, [*config['f2p'], *config['p2p']])
  wrong = [t for t in config['f2p'] if not _right(config, t, results)]
  broken = [t for t in config['p2p'] if not _right(config, t, results)]
  f2p, p2p = (
    1 - len(bad) / max(1, len(all_))
    for bad, all_ in ((wrong, config['f2p']), (broken, config['p2p']))
  )
  passed = not wrong and not broken
  reason = '' if passed else f'{len(wrong)} F2P and {len(broken)} P2P tests fail'
  partial = 'full' if passed else 'partial' if f2p and p2p == 1 else 'no'
  return {
    'reward': float(passed),
    'reason': reason,
    'resolved': partial,
    'f2p': f2p,
    'p2p': p2p,
    'failed': [*wrong, *broken][:20],
  }


def _with_canaries(config, tree, keep, strict=False):
  """Results of tests, whose canaries (canaries.py) run among them, in an unknown order.

  Raises Failed if the tests pass and a canary does not fail.
  """
  import canaries
  import copies

  jobs = [(None, keep), *(job for job in enumerate(config['canaries']) if job[1])]
  secrets.SystemRandom().shuffle(jobs)
  results, blind = {}, []
  for number, wanted in jobs:
    files = sorted({test.partition('::')[0] for test in wanted})
    texts = {path: _text(tree, path) or '' for path in files}
    with copies.copied(tree, canaries.canaries_of(texts, number)) as copy:
      found = run(config, copy, files, wanted, config['limit_s'], strict=strict)
    if number is not None:
      blind += [t for t in wanted if found.get(t) != 'FAILED']
      continue
    results = found
    if not all(_right(config, t, results) for t in keep):
      return results
  if blind:
    raise Failed(f'{len(blind)} tests also pass when they expect another value')
  return results


def _right(config, test, results):
  return results.get(test) == config.get('status', {}).get(test, 'PASSED')


def written_test(config, tree):
  """SWE-Test: the agent's test passes on the right source and fails on the bug.

  Each variant is also tried in a second form, printed from its syntax tree with no-op
  statements added: a test that compares the source's text, tree or bytecode instead of
  its behaviour is wrong on one of the two. All texts have the same length. It must also
  fail on the third variant (third.py), whose results are neither right nor those of the
  bug.
  """
  import copies
  import variants
  from reaches import names, reaches

  path = config['test']
  text = _text(tree, path)
  if text is None:
    raise Failed(f'there is no {path}')
  reached = reaches(text) - {'pytest', 'unittest', 'environ'}
  reached |= names(text) & _READERS
  if reached:
    raise Failed(f'the test uses {sorted(reached)}')
  drawn = variants.order(secrets.SystemRandom())
  sources = [variants.source(config['variants'], variant) for variant in drawn]
  longest = max(map(len, sources)) + 1
  for variant, source in zip(drawn, sources, strict=True):
    source += '#' * (longest - len(source))
    with copies.copied(tree, {config['source_path']: source}) as copy:
      results = run(config, copy, [path], None, config['limit_s'], strict=True)
    statuses = set(results.values())
    if variant == 'third':
      if not statuses & {'FAILED', 'ERROR'}:
        raise Failed('the test detects the bug, but accepts other wrong results')
      continue
    if 'ERROR' in statuses or not results:
      raise Failed(f'the test cannot be run on {variant}: {sorted(statuses)}')
    if variant.startswith('right') and statuses != {'PASSED'}:
      raise Failed(f'the test does not pass on the right source: {sorted(statuses)}')
    if variant.startswith('bug') and 'FAILED' not in statuses:
      raise Failed('the test does not find the bug')
  return {'reward': 1.0, 'reason': ''}


def review(config, tree):
  """Code review: review.json names the file and a line of the wrong change."""
  text = _text(tree, 'review.json')
  try:
    answer = json.loads(text or '')
    path, line = answer['path'], answer['line']
  except (ValueError, KeyError, TypeError, RecursionError):
    raise Failed('review.json is not {"path": text, "line": number}') from None
  right = path == config['path'] and type(line) is int and line in config['lines']
  return {'reward': float(right), 'reason': '' if right else 'another place is wrong'}


def performance(config, tree):
  """P2P once, and a stable and significant difference in the time of some tests.

  Slow and changed sources run alternately, so that both see the same load.
  """
  _refuse_reaching(config, tree)
  results = _with_canaries(config, tree, config['p2p'], strict=True)
  broken = [t for t in config['p2p'] if not _right(config, t, results)]
  if broken:
    raise Failed(f'{len(broken)} P2P tests fail')
  pairs, work = _in_turns(config, tree)
  right = faster(pairs, config['least'])
  reason = '' if right else 'not significantly faster'
  # The load of the machine may look like it once. Work that moved shows each time.
  if right and moved(work) and moved(_in_turns(config, tree)[1]):
    right, reason = False, 'the work is done where it is not timed, as at import'
  return {'reward': float(right), 'reason': reason, 'seconds': pairs}


def _in_turns(config, tree):
  """[(slow, changed), …]: seconds of the timed tests; the same of `moved`."""
  import copies

  timed = config['timed']
  files = sorted({test.partition('::')[0] for test in timed})
  pairs, work = [], []
  # Nothing of the agent's is in the slow tree.
  with copies.copied(tree, config['slow'], _sources(config, tree)) as slow:
    for _ in range(config['pairs']):
      pair, used = [], []
      for where in (slow, tree):
        seconds = {}
        results = run(config, where, files, timed, config['limit_s'], seconds, True)
        took = [seconds.get(t, (0.0, 0.0)) for t in timed]
        pair.append(sum(s for s, _ in took))
        used.append((sum(cpu_s for _, cpu_s in took), seconds['']))
      if not all(_right(config, t, results) for t in timed):
        raise Failed('timed tests fail when they run alone')
      pairs.append(pair)
      work.append(used)
  return pairs, work


def moved(work):
  """Whether the rest of a run grows by half of the gain in three of four pairs.

  `work`: [(slow, changed), …], each (CPU seconds of the timed tests, CPU seconds of the
  whole run, with imports and garbage collection). The machine's load changes both
  little.
  """
  gain = statistics.median(a[0] - b[0] for a, b in work)
  more = sorted((b[1] - b[0]) - (a[1] - a[0]) for a, b in work)
  return more[len(more) // 4] > gain / 2


def faster(pairs, least):
  """Whether the second of all pairs is faster, beyond `least` and the noise.

  The noise model: the time of a run is the program's times a factor ≥ 1 of the load,
  which changes slowly, so that two runs in turn share most of it. The gain is
  significant if every pair has half of `least` (so that what the first run stores helps
  none after it) and if its median log ratio exceeds `least` and twice the median change
  of the slow sources from pair to pair.
  """
  logs = sorted(math.log(max(a, 1e-9) / max(b, 1e-9)) for a, b in pairs)
  slow = [math.log(max(a, 1e-9)) for a, _ in pairs]
  moves = sorted(abs(b - a) for a, b in itertools.pairwise(slow))
  noise = moves[len(moves) // 2] if moves else math.inf
  enough = math.log1p(least)
  return logs[0] > enough / 2 and logs[len(logs) // 2] > max(enough, 2 * noise)


KINDS = {
  'tests': tests,
  'written_test': written_test,
  'review': review,
  'performance': performance,
}


# Running ------------------------------------------------------------------------------


def run(config, tree, files, keep, limit_s, seconds=None, strict=False):
  """{test: status} of the tests; raises Failed for interference or no end.

  Fills `seconds`, if it is given, with {test: (seconds, CPU seconds)}, and under '' the
  CPU seconds of the run.
  If `strict`, tests may neither store anything nor look at code.
  """
  request = {
    'mode': 'run',
    'nonce': secrets.token_hex(16),
    'tree': tree,
    'site': os.environ.get('M2JAX_SITE') or sysconfig.get_path('purelib'),
    'roots': config['roots'],
    'files': files,
    'keep': keep,
    'options': config.get('options', []),
    'audited': config.get('audited', []),
    'strict': strict,
    'limit_s': limit_s,
  }
  import copies

  before = copies.entries()
  answer = _ask(_server(request['site']), request)
  for path in copies.entries() - before:
    copies.remove(path)
  if answer['late']:
    raise Failed(f'the tests did not end within {limit_s} s')
  if answer['left']:
    raise Failed('the tests leave processes that do not end')
  return parse(answer['output'], request['nonce'], seconds)


@functools.cache
def _server(site):
  """A process that runs tests (harness.py); its files are gone when it begins."""
  place = tempfile.mkdtemp()
  for name in PROGRAMS:
    shutil.copyfile(os.path.join(_HERE, name), os.path.join(place, name))
  program = os.path.join(place, 'harness.py')
  process = subprocess.Popen(
    [sys.executable, '-s', '-S', '-P', '-B', program, 'serve', site],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    env={**_ENVIRONMENT, 'HOME': tempfile.gettempdir()},
    cwd='/',
    start_new_session=True,
  )
  ready = process.stdout.readline()
  shutil.rmtree(place, ignore_errors=True)
  if not ready:
    raise RuntimeError(f'harness.py does not begin: pytest may be missing in {site}')
  return process


def _ask(server, request):
  """The answer to a request; raises Failed if the tests end or stop the server."""
  answer = b''
  with contextlib.suppress(BrokenPipeError):
    server.stdin.write(json.dumps(request).encode() + b'\n')
    server.stdin.flush()
    if select.select([server.stdout], [], [], request['limit_s'] + _ANSWER_S)[0]:
      answer = server.stdout.readline()
  if answer:
    return json.loads(answer)
  server.kill()
  _server.cache_clear()
  raise Failed('the tests end the process that runs them')


def parse(output, nonce, seconds=None):
  """Results of the harness's output."""
  results, end = {}, None
  for line in output.splitlines():
    word, _, rest = line.partition(' ')
    if word != nonce:
      continue
    record = json.loads(rest)
    if end is not None:
      raise Failed('results after the end')
    if 'end' in record:
      end = record
    elif record['test'] in results:
      raise Failed(f'two results of {record["test"]}')
    else:
      results[record['test']] = record['status']
      if seconds is not None:
        seconds[record['test']] = record.get('s', 0.0), record.get('cpu_s', 0.0)
  if end is None:
    raise Failed('the tests did not run to their end')
  if seconds is not None:
    seconds[''] = end['cpu_s']
  if end['tampered'] or end['end'] != 1:  # 1: those that must fail have failed
    raise Failed(f'interference: pytest returned {end["end"]}, {end["tampered"]}')
  return results


# Sources ------------------------------------------------------------------------------


def _refuse_reaching(config, tree):
  """Fails sources that begin to use names of the verifier, or equal everything."""
  from reaches import reaches

  known = set(config['known'])
  for path in _sources(config, tree):
    text = _text(tree, path) or ''
    new = reaches(text) - known
    if new:
      raise Failed(f'{path} reaches for the verifier: {sorted(new)}')


def _sources(config, tree):
  import compose

  for directory, _, files in os.walk(tree):
    for name in files:
      path = os.path.relpath(os.path.join(directory, name), tree)
      if compose.is_work(path, config['collect'], config['exclude']):
        yield path


def _text(tree, path):
  try:
    with open(os.path.join(tree, path), encoding='utf-8', errors='replace') as file:
      return file.read()
  except OSError:
    return None


def _compose(config):
  """The tree to judge, where Harbor runs the task: from /workspace."""
  import compose
  import copies

  try:
    return copies.composed(_HERE, config['collect'], config['exclude'])
  except compose.Rejected as error:
    raise Failed(str(error)) from None


def _write(path, text):
  with contextlib.suppress(FileNotFoundError):
    os.unlink(path)
  fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
  with open(fd, 'w') as file:
    file.write(text)


if __name__ == '__main__':
  sys.path.insert(0, _HERE)
  main()
