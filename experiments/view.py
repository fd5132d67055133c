"""A run's trajectories, or a lineage of scaffolds, in a browser, also while it runs.

  python -m experiments.view --workdir=workdir/forge
  python -m experiments.view --workdir=workdir/forge --export=run.html
  python -m experiments.view --workdir=workdir/forge --compare=workdir/other

The first serves the page on loopback until Ctrl-C and prints its link; the second
writes the same page as one file that needs no server and no network; the third adds a
view of two runs side by side. docs/viewer.md. Of a workdir of experiments.evolve they
serve and write the evolution page. docs/self_evolution.md.
"""

from __future__ import annotations

import contextlib
import pathlib
import threading
from collections.abc import Callable

from absl import flags

from experiments import common
from m2jax.evolve import record
from m2jax.evolve.page import serving as evolution
from m2jax.evolve.page.source import Source
from m2jax.forge import shared
from m2jax.observe import console
from m2jax.viewer import export, serving
from m2jax.viewer.run import Run

POOL = flags.DEFINE_string('pool', '', "URL of the pool; default: the workdir's.")
PORT = flags.DEFINE_integer('port', 0, 'Where to listen; 0: a free port.', 0, 65_535)
EXPORT = flags.DEFINE_string('export', None, 'Write the page to this file, and end.')
COMPARE = flags.DEFINE_string('compare', None, 'Workdir of a run to compare it with.')


def main():
  workdir = common.workdir()
  common.check_path('export', EXPORT.value)
  common.check_path('compare', COMPARE.value)
  if EXPORT.value is not None and COMPARE.value is not None:
    raise common.BadInput('--export writes one run: leave --compare out')
  if (workdir / record.FILE_NAME).exists():
    return _lineage(workdir)
  with contextlib.ExitStack() as stack:
    run = stack.enter_context(contextlib.closing(Run(workdir, POOL.value)))
    if EXPORT.value is not None:
      return _export(run, pathlib.Path(EXPORT.value))
    other = None
    if COMPARE.value is not None:
      opened = contextlib.closing(Run(pathlib.Path(COMPARE.value)))
      other = stack.enter_context(opened)
    _serve(workdir, lambda key: serving.serving(run, key, PORT.value, other))


def _lineage(workdir: pathlib.Path) -> None:
  """The evolution page."""
  if POOL.value or COMPARE.value is not None:
    raise common.BadInput(f'--workdir={workdir}: a lineage has no --pool and --compare')
  source = Source(workdir)
  if EXPORT.value is None:
    _serve(workdir, lambda key: evolution.served(source, key, PORT.value))
  else:
    size = evolution.write(source, EXPORT.value)
    print(f'{EXPORT.value}: {size / 1e6:.1f} MB')


def _serve(
  workdir: pathlib.Path,
  serve: Callable[[str], contextlib.AbstractContextManager[str]],
) -> None:
  """Serves until Ctrl-C. `serve`: with a key; its context has the link."""
  key = shared.make_key(workdir, shared.VIEW)
  try:
    with serve(key) as link:
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
