"""Metrics that optimizers report: rows of the table in names.py.

A group is a prefix, the condition under which records have it, and its metrics: name,
unit, meaning.
"""

from __future__ import annotations

_SPHERE = (
  ('sigma_max', '1', 'largest spectral norm over its radius, before the retraction'),
  ('sigma_min', '1', 'smallest spectral norm over its radius, before the retraction'),
  ('multiplier_max', '1', 'largest absolute λ, for a momentum of norm 1'),
  ('residual_max', '1', 'largest absolute h(λ): how far directions are from tangent'),
  ('evaluations', 'evaluations', 'evaluations of the matrix sign, mean over matrices'),
  ('evaluations_max', 'evaluations', 'evaluations of the matrix sign, slowest matrix'),
)
_GNMR = (
  ('promoted', 'share', 'share of the layers that recover in the next step'),
  ('cap_hit', '1', '1 if there were more candidates than max_active'),
  ('max_risk', '1', 'largest risk of a layer; candidates are above 1 or locked'),
)
GROUPS = (
  ('sphere', 'a rule has a spectral sphere', _SPHERE),
  ('gnmr', 'gnmr.max_active is above 0', _GNMR),
)
