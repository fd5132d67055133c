"""The task directory of a draw and a statement."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m2jax.tasks import harbor
from m2jax.tasks.harbor import compose
from m2jax_pipelines.terminal_gym.drawn import Drawn, Family
from m2jax_pipelines.terminal_gym.seeds import Seed

_TEST = b'exec python3 -I -S -B "${M2JAX_TESTS:-/tests}/grade.py"\n'
_GRADE = Path(__file__).parent / 'grade.py'
_SOLVE = 'cd "${M2JAX_WORKSPACE:-/workspace}"\n'


def suite(drawn: Drawn) -> dict[str, bytes]:
  """The tests of a draw, whatever its statement."""
  files = {
    f'inputs/{number}/{path}': data
    for number, inputs in enumerate(drawn.inputs)
    for path, data in inputs.items()
  }
  expected = drawn.expected() | {'run': drawn.filled(drawn.run)}
  return {
    'test.sh': _TEST,
    'grade.py': _GRADE.read_bytes(),
    'compose.py': Path(compose.__file__).read_bytes(),
    'expected.json': json.dumps(expected).encode(),
    **files,
  }


def draft(
  family: Family,
  seed: Seed,
  drawn: Drawn,
  statement: str,
  name: str,
  details: Mapping[str, Any],
) -> harbor.Draft:
  """The task.

  Args:
    family, seed, drawn, statement: what it is made of.
    name: the directory's name.
    details: further facts.
  """
  metadata = harbor.Metadata(
    'terminal_gym',
    family.name,
    listing=True,
    run=drawn.filled(drawn.run),
    max_tool_calls=30,
    baseline_calls=len(drawn.commands),
    source=seed.facts(),
    details={'values': dict(drawn.values), **details},
  )
  return harbor.Draft(
    name=name,
    instruction=statement,
    metadata=metadata,
    overlay=drawn.workspace(),
    setup=f'set -e\nexport TZ=UTC\n{drawn.setup}' if drawn.setup else '',
    tests=suite(drawn),
    solution={'solve.sh': (_SOLVE + drawn.solution()).encode()},
    image='python:3.13-slim-bookworm',
    verifier_s=60.0,
  )
