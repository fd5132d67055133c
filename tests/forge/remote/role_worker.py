"""`experiments.forge` as a child of test_roles, with a witness of what it trains.

python -m tests.forge.remote.role_worker --role=… --config=… --workdir=…
"""

import pathlib
import sys

from tests.forge import forge_worker

if __name__ == '__main__':
  from experiments import common, forge

  (directory,) = (a.partition('=')[2] for a in sys.argv if a.startswith('--workdir='))
  if '--role=learner' in sys.argv:
    forge_worker.instrument(pathlib.Path(directory))
  common.run(forge.main, *forge.EXPECTED, distributed=True)
