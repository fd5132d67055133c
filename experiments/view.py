"""The trajectories of a run in a browser, also while it is running.

  python -m experiments.view --workdir=workdir/forge
  python -m experiments.view --workdir=workdir/forge --export=run.html

The first serves the page on loopback until Ctrl-C and prints its link; the second
writes the same page as one file that needs no server and no network. docs/viewer.md.
"""

from __future__ import annotations

import contextlib
import pathlib
import threading

from absl import flags

from experiments import common
from m2jax.forge import shared
from m2jax.observe import console
from m2jax.viewer import export, serving
from m2jax.viewer.run import Run

POOL = flags.DEFINE_string('pool', '', "URL of the pool; default: the workdir's.")
PORT = flags.DEFINE_integer('port', 0, 'Where to listen; 0: a free port.', 0, 65_535)
EXPORT = flags.DEFINE_string('export', None, 'Write the page to this file, and end.')


def main():
  workdir = common.workdir()
  common.check_path('export', EXPORT.value)
  run = Run(workdir, POOL.value)
  with contextlib.closing(run):
    if EXPORT.value is not None:
      _export(run, pathlib.Path(EXPORT.value))
    else:
      _serve(run, workdir)


def _serve(run: Run, workdir: pathlib.Path) -> None:
  """Serves until Ctrl-C."""
  key = shared.make_key(workdir, shared.VIEW)
  try:
    with serving.serving(run, key, PORT.value) as link:
      with contextlib.suppress(KeyboardInterrupt):  # also between link and wait
        print(f'{link}\nCtrl-C stops it.', flush=True)
        threading.Event().wait()
  except OSError as error:
    raise common.BadInput(f'--port={PORT.value}: {error.strerror or error}') from error
  print('\nstopped')


def _export(run: Run, path: pathlib.Path) -> None:
  with console.progress(transient=True) as bar:
    task = bar.add_task('writing the page', total=1.0)
    size = export.write(run, path, lambda x: bar.update(task, completed=x))
  print(f'{path}: {size / 1e6:.1f} MB')


if __name__ == '__main__':
  common.run(main)
