r"""Mutation testing: how many of 60 one-line bugs the tests find.

  python -m tests.mutants --check
  python -m tests.mutants --out=before.jsonl --jobs=2
  python -m tests.mutants --out=after.jsonl --pytest="-m 'not long' -n 2"
  python -m tests.mutants --compare before.jsonl after.jsonl

A mutant is one changed line of the code (`_MUTANTS`, below): five for each law of
docs/design.md §4, ten for packages that the laws miss. Each runs in a copy of the
checkout, which itself is not changed:

  stage 1   the tests of the mutated package, up to the first failure; those that name
            the module come first
  stage 2   all mutants that passed stage 1 at once, and the whole suite; where that
            fails, each mutant alone, and the files of the tests that failed

A test kills a mutant if it fails with it and passes in a copy without. A run that takes
more than the limit counts as a kill, too, unless it does so without the mutant.

The module is also the pytest plugin that reports failing tests, so every copy has it,
that of an older commit (--root) too. Tests that start processes without PYTHONPATH
would import the installed package, not the copy.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import pathlib
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_FAST = "-m 'not long and not thorough'"  # as `make test`
_REPORT = 'MUTANTS_REPORT'  # environment variable: file for the ids of failing tests


class Mutant(NamedTuple):
  """A bug: `old`, which occurs once in the file at `path`, becomes `new`.

  Attributes:
    name: law or package, a dot, and what it is about.
    tests: paths to run in stage 1.
  """

  name: str
  path: str
  old: str
  new: str
  tests: tuple[str, ...]

  def applied(self, root: pathlib.Path) -> str:
    """The mutated file. Raises ValueError unless `old` occurs once in it."""
    path = root / self.path
    text = path.read_text() if path.exists() else ''
    if (count := text.count(self.old)) != 1:
      raise ValueError(f'{self.name}: {count} times in {path}, not once: {self.old!r}')
    return text.replace(self.old, self.new)


def mutants() -> list[Mutant]:
  """The list, parsed."""
  found = []
  for block in _MUTANTS.strip().split('\n\n'):
    head, *lines = block.splitlines()
    name, path, *tests = head.split()
    old, new = (
      '\n'.join(line[2:] for line in lines if line[0] == sign) for sign in '-+'
    )
    package = path.removeprefix('m2jax/').split('/')[0].removesuffix('.py')
    folder = f'tests/{package}'
    if not any(path.startswith(f'{folder}/') for path in tests):  # a part is enough
      tests.insert(0, folder)
    found.append(Mutant(name, path, old, new, tuple(tests)))
  return found


# The plugin.


def _note(report) -> None:
  if report.failed and _REPORT in os.environ:
    with open(os.environ[_REPORT], 'a') as file:
      file.write(report.nodeid + '\n')


pytest_runtest_logreport = pytest_collectreport = _note


# The command.


class Copies:
  """Copies of a checkout, and test runs in them.

  Attributes:
    broken: ids of tests that fail without a mutant, among those that have failed.
  """

  def __init__(self, args: argparse.Namespace, directory: str):
    self._args, self._directory = args, pathlib.Path(directory)
    self._free: queue.SimpleQueue[pathlib.Path] = queue.SimpleQueue()
    for number in range(args.jobs):
      self._free.put(self._copy(f'copy{number}'))
    self._clean, self._lock = self._copy('clean'), threading.Lock()
    self._passing: set[str] = set()
    self._slow: dict[tuple[str, ...], bool] = {}
    self.broken: set[str] = set()

  def _copy(self, name: str) -> pathlib.Path:
    to, root = self._directory / name, self._args.root
    files = ('git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard')
    for file in subprocess.check_output(files, cwd=root, text=True).split('\0'):
      if file and (root / file).is_file():
        (to / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / file, to / file)  # as new, with the modes
    shutil.copyfile(__file__, to / 'tests' / 'mutants.py')
    if (root / '.venv').exists():  # where tests look for optional packages
      (to / '.venv').symlink_to((root / '.venv').resolve())
    check = 'import m2jax; print(m2jax.__file__)'
    command, env = [self._args.python, '-c', check], self._environment(to)
    found = subprocess.check_output(command, cwd=to, env=env, text=True).strip()
    if not pathlib.Path(found).is_relative_to(to.resolve()):
      raise RuntimeError(f'm2jax is imported from {found}, not from {to}')
    return to

  def _environment(self, copy: pathlib.Path) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k != 'PYTHONDONTWRITEBYTECODE'}
    cache = str(self._args.cache)
    return env | {'PYTHONPATH': str(copy), 'JAX_COMPILATION_CACHE_DIR': cache}

  @contextlib.contextmanager
  def mutated(self, group: Sequence[Mutant]) -> Iterator[pathlib.Path]:
    """A copy with the mutants, for the duration of the body."""
    copy, before = self._free.get(), {}
    try:
      for mutant in group:
        before.setdefault(mutant.path, (copy / mutant.path).read_text())
        self._write(copy / mutant.path, mutant.applied(copy))
      yield copy
    finally:
      for path, text in before.items():
        self._write(copy / path, text)
      self._free.put(copy)

  def _write(self, path: pathlib.Path, text: str) -> None:
    path.write_text(text)
    # Python detects stale bytecode by size and whole seconds only.
    for compiled in path.parent.glob(f'__pycache__/{path.stem}.*'):
      compiled.unlink()

  def run(self, copy, paths: Sequence[str], limit_s: float, *options: str):
    """Runs pytest: ids of failing tests, or None after the limit; and seconds."""
    paths = [path for path in paths if (copy / path.partition('::')[0]).exists()]
    report, output = copy / 'failing.txt', copy / 'output.txt'
    report.unlink(missing_ok=True)
    plugins = ('-p', 'no:cacheprovider', '-p', 'tests.mutants')
    known = [
      f'--{"deselect" if "::" in test else "ignore"}={test}' for test in self.broken
    ]
    command = [self._args.python, '-m', 'pytest', '-q', *plugins, *options, *known]
    with open(output, 'w') as file:  # not a pipe, which processes left over would hold
      process = subprocess.Popen(
        [*command, *shlex.split(self._args.pytest), *paths],
        cwd=copy,
        env=self._environment(copy) | {_REPORT: str(report)},
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.STDOUT,
        start_new_session=True,
      )
    started_s = time.monotonic()
    try:
      process.wait(limit_s)
    except subprocess.TimeoutExpired:
      return None, time.monotonic() - started_s
    finally:  # and whatever it has started
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      process.wait()
    failed = report.read_text().splitlines() if report.exists() else []
    if process.returncode not in (0, 1, 5) and not failed:  # 5: no tests
      print(output.read_text(errors='replace')[-2000:], file=sys.stderr)
      failed = [f'exit code {process.returncode}']
    return list(dict.fromkeys(failed)), time.monotonic() - started_s

  def files(self, mutant: Mutant) -> tuple[str, ...]:
    """The test files of stage 1: those that name the mutated module first."""
    files = []
    for path in mutant.tests:
      found = self._clean / path
      files += sorted(found.rglob('test_*.py')) if found.is_dir() else [found]
    name = re.compile(rf'\b{pathlib.Path(mutant.path).stem}\b')
    files.sort(key=lambda file: -len(name.findall(file.read_text())))
    return tuple(str(file.relative_to(self._clean)) for file in files)

  def kills(self, failed: Sequence[str]) -> list[str]:
    """Of tests that failed with a mutant, those that pass without."""
    with self._lock:
      tests = [t for t in failed if '/' in t and t not in self.broken | self._passing]
      if tests:
        again, _ = self.run(self._clean, tests, self._args.suite_limit)
        self.broken = self.broken | set(tests if again is None else again)
        self._passing |= set(tests) - self.broken
      return [test for test in failed if test not in self.broken]

  def too_slow(self, paths: tuple[str, ...], limit_s: float) -> bool:
    """Whether these tests exceed the limit without a mutant, too."""
    with self._lock:
      if paths not in self._slow:
        self._slow[paths] = self.run(self._clean, paths, limit_s)[0] is None
      return self._slow[paths]

  def first_kill(self, mutant: Mutant, paths: tuple[str, ...], limit_s: float):
    """The first test that kills a mutant, 'timeout', or ''; and seconds."""
    with self.mutated([mutant]) as copy:
      while True:
        failed, seconds = self.run(copy, paths, limit_s, '-x')
        if failed is None:
          return '' if self.too_slow(paths, limit_s) else 'timeout', seconds
        known = set(self.broken)
        if kills := self.kills(failed):
          return kills[0], seconds
        if set(failed) <= known:
          return '', seconds


def _stage_2(copies: Copies, group: Sequence[Mutant], limit_s: float) -> dict:
  """Mutant → the test that kills it, or ''; and seconds."""
  with copies.mutated(group) as copy:
    failed, seconds = copies.run(copy, (), limit_s)
  if failed is None and len(group) > 1:
    middle = len(group) // 2
    found = _stage_2(copies, group[:middle], limit_s)
    return found | _stage_2(copies, group[middle:], limit_s)
  kills = ['timeout'] if failed is None else copies.kills(failed)
  if len(group) == 1 or not kills:
    return dict.fromkeys(group, (kills[0] if kills else '', seconds))
  files = tuple(dict.fromkeys(kill.partition('::')[0] for kill in kills))
  alone = {mutant: copies.first_kill(mutant, files, limit_s) for mutant in group}
  if not any(test for test, _ in alone.values()):
    print(f'only together they fail {kills}', file=sys.stderr)
  return alone


def _read(path: pathlib.Path) -> dict[str, dict]:
  """The last record of each mutant; of a line that was cut off nothing."""
  found = {}
  for line in path.read_text().splitlines() if path.exists() else ():
    with contextlib.suppress(json.JSONDecodeError):
      record = json.loads(line)
      found[record['name']] = record
  return found


def _run(args: argparse.Namespace, chosen: Sequence[Mutant]) -> None:
  done = _read(args.out)
  args.cache.mkdir(parents=True, exist_ok=True)

  def write(mutant: Mutant, stage: int, test: str, seconds: float) -> None:
    record = {'name': mutant.name, 'path': mutant.path, 'stage': stage}
    record |= {'test': test, 'seconds': round(seconds, 1)}
    with open(args.out, 'a') as file:
      file.write(json.dumps(record) + '\n')
    print(f'{mutant.name}, stage {stage}: {test or "lives"}', file=sys.stderr)

  with tempfile.TemporaryDirectory('mutants', ignore_cleanup_errors=True) as directory:
    copies = Copies(args, directory)
    todo = [mutant for mutant in chosen if mutant.name not in done]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
      first = {
        pool.submit(copies.first_kill, m, copies.files(m), args.limit): m for m in todo
      }
      try:
        for future in concurrent.futures.as_completed(first):
          write(first[future], 1, *future.result())
      except BaseException:  # what runs ends first
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    done = _read(args.out)
    left = [
      m for m in chosen if done[m.name]['stage'] == 1 and not done[m.name]['test']
    ]
    if left:
      for mutant, (test, seconds) in _stage_2(copies, left, args.suite_limit).items():
        write(mutant, 2, test, seconds)


def _table(columns: Sequence[dict[str, dict]]) -> str:
  """Markdown: the file that kills each mutant, one pair of columns for each run."""
  lines = ['| mutant | of' + ' | killed by | s' * len(columns) + ' |']
  lines.append('|---' * (2 + 2 * len(columns)) + '|')
  names = list(dict.fromkeys(name for column in columns for name in column))
  order = {mutant.name: number for number, mutant in enumerate(mutants())}
  for name in sorted(names, key=lambda name: order.get(name, len(order))):
    of, _, what = name.partition('.')
    cells = [what, of]
    for column in columns:
      record = column.get(name)
      if record:
        file = record['test'].partition('::')[0].removeprefix('tests/')
        cells += [file or '**lives**', record['seconds']]
      else:
        cells += '––'
    lines.append('| ' + ' | '.join(map(str, cells)) + ' |')
  total = ['total', '']
  for column in columns:
    killed = sum(bool(record['test']) for record in column.values())
    total += [f'{killed} of {len(column)}']
    total += [round(sum(record['seconds'] for record in column.values()))]
  return '\n'.join([*lines, '| ' + ' | '.join(map(str, total)) + ' |'])


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add, path = parser.add_argument, pathlib.Path
  root, temporary = path(__file__).parent.parent, path(tempfile.gettempdir())
  add('--root', type=path, default=root, help='checkout to copy')
  add('--python', default=sys.executable, help='interpreter')
  add('--only', default='', metavar='NAME,NAME', help='these mutants')
  add('--jobs', type=int, default=1, help='mutants at once in stage 1')
  add('--pytest', default=_FAST, help='arguments of pytest; default: %(default)r')
  add('--limit', type=float, default=600, help='seconds of a run of stage 1')
  add('--suite-limit', type=float, default=10800, help='seconds of a whole suite')
  add('--out', type=path, default=path('mutants.jsonl'), help='continued if it exists')
  add('--cache', type=path, default=temporary / 'mutants-jax', help='compiled programs')
  add('--check', action='store_true', help='only check and print the mutants')
  add('--compare', nargs=2, type=path, metavar=('A', 'B'), help='two results')
  args = parser.parse_args()
  if args.compare:
    before, after = map(_read, args.compare)
    print(_table([before, after]))
    lost = [n for n, r in after.items() if not r['test'] and before.get(n, r)['test']]
    print(f'\nkilled in the first run only: {", ".join(lost) or "none"}')
    return
  args.root, args.cache = args.root.resolve(), args.cache.resolve()
  only = set(filter(None, args.only.split(',')))
  if unknown := only - {mutant.name for mutant in mutants()}:
    parser.error(f'--only: there is no {", ".join(sorted(unknown))}')
  chosen = [mutant for mutant in mutants() if not only or mutant.name in only]
  for mutant in chosen:
    try:
      compile(mutant.applied(args.root), mutant.path, 'exec')
    except (ValueError, SyntaxError) as error:
      parser.error(str(error))
    if args.check:
      print(f'{mutant.name}: {mutant.path}; {" ".join(mutant.tests)}')
  if args.check:
    return
  _run(args, chosen)
  results = _read(args.out)
  print(_table([{mutant.name: results[mutant.name] for mutant in chosen}]))


# Name, file, more tests of stage 1; `-` is a part of a line, `+` what replaces it.
_MUTANTS = r"""
law1.key-block-edge m2jax/kernels/tree_attention/block_pairs.py
- seen = (first_key <= last_q) &
+ seen = (first_key < last_q) &

law1.window-edge m2jax/kernels/tree_attention/cpu.py tests/model
- seen &= (q_at - k_at < index.window)
+ seen &= (q_at - k_at <= index.window)

law1.adjacent-branches m2jax/forest/cutting.py tests/model
- while path and end[path[-1]] <= branch:
+ while path and end[path[-1]] < branch:

law1.drafts-tree-edge m2jax/kernels/paged_attention/cache.py
- (jnp.arange(C)[:, None] < end[:, None])
+ (jnp.arange(C)[:, None] <= end[:, None])

law1.tokens-of-a-row m2jax/forest/buckets.py
- np.count_nonzero(batch.subtree_end, axis=1)
+ np.count_nonzero(batch.position, axis=1)

law2.first-token-has-no-loss m2jax/forest/merging.py tests/train/test_step.py
- prompt_length=min(1, len(d))
+ prompt_length=0

law2.mtp-hidden-keys m2jax/layers/attention.py tests/train/test_step.py
- seen.k_position >= depth,
+ seen.k_position >= depth - 1,

law2.mtp-mean-over-modules m2jax/train/step.py tests/train/test_step.py
- out.mtp_logprob) / cfg.num_mtp_modules
+ out.mtp_logprob)

law2.clip-high m2jax/rl/ppo_clip.py
- jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
+ jnp.clip(ratio, 1 - clip_low, 1 + clip_low)

law2.draft-loss-of-the-rest m2jax/layers/draft_loss.py
- (jnp.log(rest_p) - jnp.log(rest_q))
+ (jnp.log(rest_q) - jnp.log(rest_p))

law3.equal-samples-count m2jax/forest/merging.py tests/model
- ends[place.row, row.path[length - 1]] += 1
+ ends[place.row, row.path[length - 1]] = 1

law3.cotangents-of-padding m2jax/train/chunks.py tests/model/test_forest_chunks.py
- return jnp.where(mask, entries, 0).astype(like.dtype)
+ return entries.astype(like.dtype)

law3.record-of-the-sampler m2jax/forest/replay.py tests/model
- np.arange(length) >= samples[index].prompt_length
+ np.arange(length) > samples[index].prompt_length

law3.slots-seen-by-a-piece m2jax/forest/cutting.py tests/model/test_forest_chunks.py
- -np.arange(stack), side='right')
+ -np.arange(stack), side='left')

law3.rerouted-with-multiplicity m2jax/train/step.py tests/rl/test_replay.py
- jnp.sum(batch.multiplicity * tokens, dtype=loss.dtype)
+ jnp.sum(tokens, dtype=loss.dtype)

law4.seed-in-training m2jax/gateway/sampling.py
- stop_ids=stop_ids, top_logprobs=top_logprobs)
+ stop_ids=stop_ids, top_logprobs=top_logprobs, seed=asked.get('seed'))

law4.version-of-each-token m2jax/rollout/serving/sequences.py
- self.versions[row, position] = version
+ self.versions[row, position] = self.version[row]

law4.extends-same-reasoning m2jax/gateway/sessions.py
- if node.tools == tools and node.reasoning == reasoning
+ if node.tools == tools

law4.verified-random-stream m2jax/rollout/engine/speculative.py
- how.counters + jnp.tile(jnp.arange(C), P)
+ how.counters + jnp.repeat(jnp.arange(C), P)

law4.agreement-on-policy m2jax/rl/agreement.py
- live & (lag == kind)
+ live & (lag >= kind)

law5.report-counts-once m2jax/pool/leases.py
- i.state == 'pending', i.report.is_(None))
+ i.state == 'pending')

law5.ledger-of-its-step m2jax/pool/ledger.py
- open_ |= taken & (i.step > step)
+ open_ |= taken & (i.step >= step)

law5.masked-in-normaliser m2jax/rl/terms.py
- groups * np.count_nonzero(group) * group
+ groups * len(group) * group

law5.verdict-that-times-out m2jax/agents/episodes.py tests/faults/test_agents.py
- except (sandbox.SandboxError, OSError) as error:
+ except sandbox.SandboxError as error:

law5.batch-in-a-transaction m2jax/pool/writer.py
-       with connection.begin_nested():
-         self._insert(
+       with contextlib.nullcontext():
+         self._insert(

law6.norm-over-split-heads m2jax/layers/attention.py tests/sharding
- sharding.pmean(both, 'heads')
+ sharding.psum(both, 'heads')

law6.second-round m2jax/moe/exchange.py
- jnp.clip(queued + done - first, 0, static.rows)
+ jnp.clip(queued + done, 0, static.rows)

law6.split-vocabulary m2jax/kernels/token_logprobs/api.py tests/sharding
- total = _sum(total * scale, axes)
+ total = _sum(total, axes)

law6.loads-of-residual-parts m2jax/model.py tests/sharding
- sharding.psum(loads, *everywhere)
+ sharding.psum(loads, *everywhere[:2])

law6.chunks-once-over-hosts m2jax/train/chunks.py tests/forge/test_processes.py
- mine = slice(0, 1) if hosts.index == 0 else slice(0, 0)
+ mine = slice(0, 1)

law7.full-block-pairs m2jax/kernels/tree_attention/block_pairs.py
- (last_q < jnp.min(end, axis=-1))
+ (last_q <= jnp.min(end, axis=-1))

law7.number-of-tiles m2jax/kernels/grouped_matmul/cpu.py
- tile = jnp.arange(num_rows // b + groups)
+ tile = jnp.arange(num_rows // b + groups - 1)

law7.rows-past-the-last m2jax/kernels/qk_norm_rope/tpu.py
- jnp.where(row < static.count, part, 0)
+ jnp.where(row <= static.count, part, 0)

law7.logsumexp-of-parts m2jax/kernels/paged_attention/blocks.py
- jnp.where(nonempty, safe + jnp.log(divisor), jnp.inf)
+ jnp.where(nonempty, jnp.log(divisor), jnp.inf)

law7.fp8-tiles-of-gradients m2jax/kernels/block_fp8/gradients.py
- quantize(d_out, TOKENS, how))
+ quantize(d_out, TOKEN, how))

law8.router-in-fp32 m2jax/moe/router.py
- scores = score(fp32.matmul(x, kernel))
+ scores = score(x @ kernel.astype(x.dtype))

law8.remainder-of-weights m2jax/kernels/fp32.py
- for part in (high, w - high))
+ for part in (high,))

law8.logits-in-chunks m2jax/kernels/token_logprobs/api.py
- c = min(max(_CHUNK_LOGITS // vocab, _CHUNK_TOKENS), max(len(x), 1))
+ c = max(len(x), 1)

law8.softmax-of-rollout m2jax/kernels/paged_attention/cpu.py
- wide = jnp.promote_types(q.dtype, jnp.float32)
+ wide = q.dtype

law8.head-gathered-in-fp32 m2jax/sharding/shards.py
- to = None if parts or BY_NAME[name].kind in _WIDE else np.dtype(dtype)
+ to = None if parts else np.dtype(dtype)

law9.body-in-one-piece m2jax/gateway/receiving.py
- if len(body) + len(chunk) > limit_bytes:
+ if len(body) > limit_bytes:

law9.depth-of-json m2jax/text/strict_json.py tests/gateway/test_bounds.py
- if depth >= max_depth:
+ if depth > max_depth:

law9.bytes-of-an-archive m2jax/sandbox/archive.py
- if self.tell() + len(data) > self._max_bytes:
+ if len(data) > self._max_bytes:

law9.dtype-of-a-leaf m2jax/checkpoint/leaves.py
- elif (have.shape, have.dtype) != (want.shape, want.dtype):
+ elif have.shape != want.shape:

law9.true-is-no-integer m2jax/gateway/fields.py
- if isinstance(value, bool) or not isinstance(value, int):
+ if not isinstance(value, int):

law10.wilson-interval m2jax/observe/stats.py
- z2 / (4 * n * n)
+ z2 / (4 * n)

law10.flops-of-saved-attention m2jax/plan/flops.py
- blocks * (attention - saved)
+ blocks * attention

law10.bytes-of-reduce-scatter m2jax/plan/collectives.py
- return size * group_size
+ return size

law10.memory-of-a-step m2jax/plan/estimate.py
- return max(p.memory.total for p in self.programs if p.runs)
+ return max(p.memory.total for p in self.programs)

law10.longer-than-shown benchmarks/forge_table.py
- for n, pair in held_out.lengths.items() if n > demonstrated]
+ for n, pair in held_out.lengths.items() if n >= demonstrated]

text.closing-tag-behind-the-last-call m2jax/text/invokes.py
- for k in range(1, len(found), 2):
+ for k in range(1, len(found) - 2, 2):

data.documents-of-a-stream m2jax/data/packing.py
- self.position + self._stride, 0
+ self.position + 1, 0

optim.nesterov-bias-correction m2jax/optim/muon.py
- optax.tree.bias_correction(mu, beta, count + 1)
+ optax.tree.bias_correction(mu, beta, count)

viewer.line-that-was-cut-off m2jax/viewer/annotations.py
- torn = size and os.pread(file, 1, size - 1) != b'\n'
+ torn = False

launch.largest-slice launch/topology.py
- small_enough = math.prod(shape) <= _CUBES * 64
+ small_enough = math.prod(shape) < _CUBES * 64

observe.all-or-none-of-a-line m2jax/observe/metrics.py tests/faults/test_disk.py
- os.ftruncate(fd, os.fstat(fd).st_size - written)
+ os.ftruncate(fd, os.fstat(fd).st_size)

agents.window-of-few-turns m2jax/agents/context.py
- starts[max(count - keep, min(first, count))]
+ starts[count - keep]

tasks.link-instead-of-a-file m2jax/tasks/verify.py
- flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
+ flags = os.O_RDONLY | os.O_NONBLOCK

experiments.whole-file experiments/transfer.py tests/experiments/test_transfer.py
- new, count = path.with_name(path.name + '.new'), 0
+ new, count = path, 0

forge.prune-to-the-oldest m2jax/forge/rl_loop.py tests/forge/test_rl_loop.py
- oldest = min(self._manager.steps()[-KEEP:], default=None)
+ oldest = max(self._manager.steps()[-KEEP:], default=None)
"""

if __name__ == '__main__':
  main()
