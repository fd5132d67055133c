"""Runs several mains in forks of one process that has imported what they need.

  python -m tests.experiments.many CASES.json

CASES.json: {name: [module, flag, …]}. Prints {name: {code, out, err}} as JSON. Each
fork is a real run of the program, flags, exit code and all; only the imports of jax
and of m2jax, two seconds of every start, are shared.
"""

import json
import os
import pathlib
import runpy
import sys
import tempfile
import traceback

import m2jax.forge.run
import m2jax.train.pretrain  # noqa: F401


def run(module: str, argv: list[str], out: int, err: int):
  """In the child: becomes the program."""
  os.dup2(out, 1)
  os.dup2(err, 2)
  sys.argv = [module, *argv]
  code = 1
  try:
    runpy.run_module(module, run_name='__main__', alter_sys=True)
    code = 0
  except SystemExit as exit_:
    code = exit_.code or 0
  except BaseException:
    traceback.print_exc()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)


def main():
  cases = json.loads(pathlib.Path(sys.argv[1]).read_text())
  results = {}
  for name, (module, *argv) in cases.items():
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
      child = os.fork()
      if not child:
        run(module, argv, out.fileno(), err.fileno())
      code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
      texts = []
      for file in (out, err):
        file.seek(0)
        texts.append(file.read().decode())
      results[name] = {'code': code, 'out': texts[0], 'err': texts[1]}
  print(json.dumps(results))


if __name__ == '__main__':
  main()
