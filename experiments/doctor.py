"""Examines a run, also while it is running: what went wrong, why, what to change.

  python -m experiments.doctor --workdir=workdir/forge
  python -m experiments.doctor --workdir=workdir/forge --json
  python -m experiments.doctor --workdir=workdir/forge --verify
  python -m experiments.doctor --workdir=workdir/forge \
    --model_url=http://localhost:8000/v1 --model=NAME

Exit status: 0 without findings, 1 with findings, 2 for bad input. It writes nothing but
findings.json (--write) and reruns (--verify, WORKDIR/verify-N), and starts nothing but
these. docs/run_doctor.md lists what it detects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags, logging

from experiments import common, own_kinds
from m2jax import sandbox
from m2jax.evolve import chat_model, doctor
from m2jax.evolve.doctor import (
  finding,
  logs,
  model,
  patches,
  rules,
  settings,
  trials,
  verify,
)
from m2jax.observe import findings as shown_findings

POOL = flags.DEFINE_string('pool', '', "URL of the pool; default: the workdir's.")
LOG = flags.DEFINE_multi_string('log', [], 'Log of the run, besides WORKDIR/*.log.')
JSON = flags.DEFINE_bool('json', False, 'Print one JSON object.')
WRITE = flags.DEFINE_bool(
  'write', False, 'Write WORKDIR/findings.json, for report and trajectory page.'
)
MODEL_URL = flags.DEFINE_string(
  'model_url', '', 'URL (…/v1) of a model that proposes the change; default: rules.'
)
MODEL = flags.DEFINE_string('model', '', 'Its name there.')
MODEL_API = flags.DEFINE_enum(
  'model_api', 'openai', chat_model.APIS, 'The API of --model_url.'
)
MODEL_KEY = flags.DEFINE_string(
  'model_key', '', 'Environment variable of its key; default: API_API_KEY in capitals.'
)
RECORDED = flags.DEFINE_string(
  'recorded', '', 'JSON list of answers in place of a model: a test of the plumbing.'
)
OWN_CODE = flags.DEFINE_bool(
  'own_code', False, "The config's import paths are yours: they may be run and patched."
)
TESTS = flags.DEFINE_string(
  'tests', '', 'Command that a patch must pass, such as "python -m pytest tests/mine".'
)
VERIFY = flags.DEFINE_bool('verify', False, 'Rerun the faulty span with the change.')
VERIFY_MINUTES = flags.DEFINE_float(
  'verify_minutes', 10.0, 'Limit of the tests, and of the rerun.', 0.01, 7 * 24 * 60.0
)

_FOUND = 1
Change = rules.Proposal | model.Patch


@dataclasses.dataclass(frozen=True)
class Role:
  """What the model role came to: `by` whom, and the answer."""

  by: str
  answer: model.Answer


def main():
  workdir = common.workdir()
  if not workdir.is_dir():
    raise common.BadInput(f'--workdir={workdir}: no such directory')
  _check_flags()
  log_files = [pathlib.Path(path) for path in LOG.value]
  found = doctor.examine(workdir, pool_url=POOL.value, log_files=log_files)
  if WRITE.value:
    shown_findings.write(workdir, [x.as_dict() for x in found])
  config = settings.read(workdir)
  checkout = _checkout(config)
  role = _propose(found, config, checkout, logs.read(workdir, log_files))
  tests = outcome = None
  change = role.answer.change
  if not JSON.value:
    _print(found, role)
  with contextlib.ExitStack() as stack:
    place = None
    if isinstance(change, model.Patch):
      place = stack.enter_context(patches.worktree(checkout, change.diff))
      tests = trials.run_tests(place, TESTS.value, VERIFY_MINUTES.value)
      if not JSON.value:
        print(f'tests: {"passed" if tests.passed else "failed"}\n{tests.tail}')
    if VERIFY.value and change is not None:
      outcome = _verify(workdir, found, config, change, place, tests)
      if not JSON.value:
        print(f'rerun: {outcome.verdict}: {outcome.why}')
        if outcome.new:
          print(f'  new in it: {", ".join(outcome.new)}')
  if JSON.value:
    shown = {
      'findings': [x.as_dict() for x in found],
      'proposal': dataclasses.asdict(change) if change else None,
      'proposed_by': role.by,
      'errors': role.answer.errors,
      'tests': dataclasses.asdict(tests) if tests else None,
      'rerun': dataclasses.asdict(outcome) if outcome else None,
    }
    print(json.dumps(shown, indent=2))
  if found:
    sys.exit(_FOUND)


def _check_flags() -> None:
  if bool(MODEL_URL.value) != bool(MODEL.value):
    raise common.BadInput('--model_url and --model: give both, or neither')
  if MODEL_URL.value and RECORDED.value:
    raise common.BadInput(
      '--recorded takes the place of a model: leave --model_url out'
    )
  if OWN_CODE.value and not TESTS.value:
    raise common.BadInput(
      '--own_code: needs --tests, the command that a patch must pass'
    )


def _checkout(config: Mapping[str, Any]) -> patches.Checkout | None:
  """The files that may be patched: of the repository that this was started in."""
  if not OWN_CODE.value:
    return None
  return patches.find(own_kinds.import_paths(config), pathlib.Path.cwd())


def _build(values: Mapping[str, Any]) -> Any:
  return own_kinds.build(values, own=OWN_CODE.value)


def _propose(
  found: Sequence[finding.Finding],
  config: Mapping[str, Any],
  checkout: patches.Checkout | None,
  log: logs.Log,
) -> Role:
  """The change that rules or a model propose."""
  if RECORDED.value:
    by, ask = 'recorded answers, a test of the plumbing', _recorded(RECORDED.value)
  elif MODEL_URL.value:
    key = MODEL_KEY.value or f'{MODEL_API.value.upper()}_API_KEY'
    asked = chat_model.ChatModel(MODEL_URL.value, MODEL.value, MODEL_API.value, key)
    by, ask = MODEL.value, asked.ask
  else:
    return Role('rules', model.Answer(rules.propose(found, config, _build)))
  patching: dict[str, Any] = {}
  if checkout is not None:
    patching['files'] = checkout.files
    patching['check_diff'] = lambda diff: patches.check(checkout, diff)
  lines = logs.around(found, log)
  try:
    answer = model.propose(found, config, _build, ask, log=lines, **patching)
  except chat_model.NoAnswer as error:  # the findings are of use without it
    answer = model.Answer(None, errors=(str(error),))
  return Role(by, answer)


def _recorded(path: str) -> model.Ask:
  """Answers from a file, one after another."""
  try:
    answers = json.loads(pathlib.Path(path).read_text())
  except (OSError, ValueError) as error:
    raise common.BadInput(f'--recorded={path}: {error}') from error
  if not isinstance(answers, list) or not all(isinstance(x, str) for x in answers):
    raise common.BadInput(f'--recorded={path}: must be a JSON list of texts')
  left = iter(answers)

  def ask(system, messages) -> str:
    if (answer := next(left, None)) is None:
      raise common.BadInput(f'--recorded={path}: has no further answer')
    return answer

  return ask


def _verify(
  workdir: pathlib.Path,
  found: Sequence[finding.Finding],
  config: Mapping[str, Any],
  change: Change,
  place: pathlib.Path | None,
  tests: trials.Tests | None,
) -> verify.Verdict:
  """Reruns the span of the finding that the change answers."""
  if tests is not None and not tests.passed:
    return verify.Verdict(verify.UNDECIDED, 'the patch fails the tests: not rerun')
  aim = next(x for x in found if x.kind == change.kind)
  field = ''
  if isinstance(change, rules.Proposal):
    field = change.field
    config = rules.changed(config, field, change.new)
  try:
    module = own_kinds.job(config)
    plan = verify.prepare(workdir, aim, config, field)
    logging.info('rerun in %s, to step %d', plan.workdir, plan.until_step)
    if isinstance(change, model.Patch):
      assert place is not None
      (plan.workdir / 'change.diff').write_text(change.diff)
      status = trials.rerun(place, plan, module, VERIFY_MINUTES.value)
    else:
      status = _rerun(plan, verify.command(plan, module, VERIFY_MINUTES.value * 60))
    return verify.judge(plan, aim, found, status)
  except (ValueError, OSError, sandbox.SandboxPathError) as error:
    # Such as a checkpoint that the live run has deleted, or a full workspace.
    return verify.Verdict(verify.UNDECIDED, str(error))


def _rerun(plan: verify.Plan, command: Sequence[str]) -> int:
  """Exit status of the rerun as a process, which ends with this one."""
  hidden = {MODEL_KEY.value, *(f'{api.upper()}_API_KEY' for api in chat_model.APIS)}
  env = {name: value for name, value in os.environ.items() if name not in hidden}
  with open(plan.workdir / verify.LOG, 'wb') as log:
    child = subprocess.Popen(
      command,
      stdin=subprocess.DEVNULL,
      stdout=log,
      stderr=subprocess.STDOUT,
      env=env,
      start_new_session=True,
    )
  try:
    return child.wait()
  finally:
    child.terminate()  # `until` ends the job
    child.wait()


def _print(found: Sequence[finding.Finding], role: Role) -> None:
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
  answer, by = role.answer, '' if role.by == 'rules' else f' by {role.by}'
  for error in answer.errors:
    print(f'no valid answer{by}: {error}')
  if isinstance(answer.change, rules.Proposal):
    change = answer.change
    print(
      f'proposal for {change.kind}{by}: --config.{change.field}={change.new} '
      f'(now {change.old}): {change.reason}'
    )
  elif isinstance(answer.change, model.Patch):
    change = answer.change
    print(f'patch for {change.kind}{by}: {change.reason}\n{change.diff}')
  elif answer.reason and found:
    print(f'no proposal{by}: {answer.reason}')


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
  common.run(main, sandbox.SandboxUnavailable)
