"""What a traced program is made of."""

from __future__ import annotations

import jax.extend


def equations(jaxpr):
  """All equations in order, those inside of others after the one that has them."""
  for eqn in jaxpr.eqns:
    yield eqn
    for inner in jax.extend.core.jaxprs_in_params(eqn.params):
      yield from equations(inner)
