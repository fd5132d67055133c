"""`experiments.forge` as a child of test_roles, with a witness of what it trains.

WITNESS=DIRECTORY python -m tests.forge.roles.role_worker --role=… --workdir=… …
"""

import os
import pathlib
import sys

from tests.forge import forge_worker

if __name__ == '__main__':
  from experiments import common, forge

  if {'--role=learner', '--role=all'} & set(sys.argv):
    forge_worker.instrument(pathlib.Path(os.environ['WITNESS']))
  common.run(forge.main, *forge.EXPECTED, distributed=True)
