"""Examines a run, also while it is running: what went wrong, why, what to change.

  python -m experiments.doctor --workdir=workdir/forge
  python -m experiments.doctor --workdir=workdir/forge --json

Exit status: 0 without findings, 1 with findings, 2 for bad input. Nothing is written
and nothing restarted. docs/self_evolution.md lists what it detects.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import pathlib
import sys

from absl import flags

from experiments import common, own_kinds
from m2jax.evolve import doctor
from m2jax.evolve.doctor import finding, rules, settings

POOL = flags.DEFINE_string('pool', '', "URL of the pool; default: the workdir's.")
LOG = flags.DEFINE_multi_string('log', [], 'Log of the run, besides WORKDIR/*.log.')
JSON = flags.DEFINE_bool('json', False, 'Print one JSON object.')

_FOUND = 1


def main():
  workdir = common.workdir()
  if not workdir.is_dir():
    raise common.BadInput(f'--workdir={workdir}: no such directory')
  log_files = [pathlib.Path(path) for path in LOG.value]
  found = doctor.examine(workdir, pool_url=POOL.value, log_files=log_files)
  config = settings.read(workdir)
  proposal = rules.propose(found, config, own_kinds.build)
  if JSON.value:
    shown = {
      'findings': [x.as_dict() for x in found],
      'proposal': dataclasses.asdict(proposal) if proposal else None,
    }
    print(json.dumps(shown, indent=2))
  else:
    _print(found, proposal)
  if found:
    sys.exit(_FOUND)


def _print(found: list[finding.Finding], proposal: rules.Proposal | None) -> None:
  if not found:
    print('no findings')
  for x in found:
    print(f'{x.severity}: {x.kind}{_where(x)}\n  {x.summary}.')
    for e in x.evidence:
      print(f'  {_values(e)}')
    for line in x.log:
      print(f'  log: {line}')
    for cause in x.causes:
      print(f'  likely: {cause.text}{f" ({cause.field})" if cause.field else ""}')
    print()
  if proposal is not None:
    print(
      f'proposal for {proposal.kind}: --config.{proposal.field}={proposal.new} '
      f'(now {proposal.old}): {proposal.reason}'
    )


def _where(x: finding.Finding) -> str:
  parts = [x.phase] if x.phase else []
  if x.first_step is not None:
    parts.append(f'steps {x.first_step:,} to {x.last_step:,}')
  if x.first_s is not None:
    begins, ends = (
      datetime.datetime.fromtimestamp(t).isoformat(' ', 'seconds')
      for t in (x.first_s, x.last_s if x.last_s is not None else x.first_s)
    )
    parts.append(begins if begins == ends else f'{begins} to {ends}')
  return f': {", ".join(parts)}' if parts else ''


def _values(e: finding.Evidence) -> str:
  values = ' '.join(f'{v:.4g}' for v in e.values)
  steps = f' at steps {e.steps[0]:,} to {e.steps[-1]:,}' if e.steps else ''
  bound = '' if e.threshold is None else f'; threshold {e.threshold:.4g}'
  why = f' ({e.calibration})' if e.calibration else ''
  return f'{e.name}{steps}: {values}{bound}{why}'


if __name__ == '__main__':
  common.run(main)
