"""Saves a Hugging Face directory and dies by SIGKILL in its second file.

python -m tests.checkpoint.killed_save DIRECTORY
"""

import os
import signal
import sys
from unittest import mock

from m2jax.checkpoint import huggingface
from m2jax.checkpoint.huggingface import streaming
from tests.checkpoint.test_huggingface import CFG, random_variables


def main(directory):
  rows = streaming.rows

  def killed(array, index, *args, **kwargs):
    if index == (1, 2):
      os.kill(os.getpid(), signal.SIGKILL)
    return rows(array, index, *args, **kwargs)

  with mock.patch.object(streaming, 'rows', killed):
    huggingface.save(directory, CFG, random_variables(), max_shard_bytes=4000)


if __name__ == '__main__':
  main(sys.argv[1])
