"""Significant differences in the time of tests: interleaved pairs of runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from m2jax_pipelines.context import Context
from m2jax_pipelines.swe import drafts, environment, grade
from m2jax_pipelines.swe.environment import Environment

PAIRS = 7  # of runs, for a difference in time
LEAST = 0.2  # gain in time that counts


async def significant(
  env: Environment, context: Context, slow: Mapping[str, bytes], tests: Sequence[str]
) -> tuple[list[str], float]:
  """Tests that take longer on another tree, and how many times all of them do.

  A gain of twice `LEAST` is asked for, so that the same comparison with `LEAST` passes
  again and again in the admission.
  """
  pairs, files = [], sorted({drafts.test_file(t) for t in tests})
  request = dict(roots=env.roots, files=files, keep=list(tests))
  for _ in range(PAIRS):
    ran = [
      await environment.run(context.dataset, env.site, tree, 'run', **request)
      for tree in (slow, env.source.files)
    ]
    pairs.append([{t: r.get('s', 0.0) for t, r in one.tests.items()} for one in ran])
    a, b = pairs[-1]
    # `grade.faster` asks for half of the gain in every pair.
    least = math.exp(math.log1p(2 * LEAST) / 2)
    tests = [t for t in tests if a.get(t, 0.0) > least * b.get(t, 0.0)]
    if not tests:
      return [], 0.0

  def times(chosen):
    return [[sum(one.get(t, 0.0) for t in chosen) for one in pair] for pair in pairs]

  timed = [t for t in tests if grade.faster(times([t]), 2 * LEAST)]
  if not timed or not grade.faster(times(timed), 2 * LEAST):
    return [], 0.0
  logs = [math.log(a / max(b, 1e-9)) for a, b in times(timed)]
  return timed, math.exp(statistics.median(logs))
