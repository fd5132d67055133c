"""The kinds of findings: severity, log lines that belong to them, likely causes.

One table, as data. A field is the dotted name in the run's config.json, in which
`{optimizer}` and `{step}` are those of the finding's phase and `{rule}` the rule of the
hidden matrices. The first cause is the likeliest.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from m2jax.evolve.doctor import settings
from m2jax.evolve.doctor.finding import Cause, Finding

ERROR, WARNING = 'error', 'warning'
# Where the settings of each phase are, in the config of the main job and of SFT; in
# that of other jobs these parts are at the top.
_OPTIMIZER = {
  'pretrain': 'pretrain.optimizer',
  'sft': 'sft.optimizer',
  'more_sft': 'more_sft.optimizer',
  'rl': 'rl.optimizer',
}
_STEP = {
  'pretrain': 'pretrain.step',
  'sft': 'sft.step',
  'more_sft': 'sft.step',
  'rl': 'rl.learner.step',
}


@dataclasses.dataclass(frozen=True)
class Kind:
  """One kind of finding.

  Attributes:
    severity: 'error': the run learns nothing useful; 'warning': less than it could.
    causes: (text, field) of each; a field of '' is code, data or the machine.
    log: pattern of the log lines that belong to it; '' for none.
    effect: it mostly follows from another finding, after which it is listed.
  """

  severity: str
  causes: tuple[tuple[str, str], ...]
  log: str = ''
  effect: bool = False


_RATE = 'the learning rate is too high', '{optimizer}.{rule}.learning_rate'
_ADAM = 'the learning rate of Adam is too high', '{optimizer}.adam.learning_rate'
_CLIP = 'gradients are not clipped, or too high', '{optimizer}.clip_norm'
_CODE = 'an error in the loss, its mask or the reward', ''
_MACHINE = 'other work on the machine, or less memory or bandwidth', ''
_AGENTS = 'too many agents at once for the machine', 'episodes.concurrency'
_DEADLINE = 'items end by their deadline', 'rl.item_deadline_s'
_CAP = 'the bound of the importance ratio is below usual ratios'

KINDS: Mapping[str, Kind] = {
  'damaged_metrics': Kind(
    ERROR, (('another program wrote the file, or a disk fails', ''),)
  ),
  'repeated_steps': Kind(
    WARNING,
    (('two learners write one workdir, or a restart voided no records', ''),),
    r'in use by|lineage',
  ),
  'not_finite': Kind(ERROR, (_RATE, _ADAM, _CLIP, _CODE), r'(?i)\bnan\b|not finite'),
  'loss_spike': Kind(WARNING, (_RATE, _ADAM, _CLIP, ('a batch of other data', ''))),
  'loss_divergence': Kind(ERROR, (_RATE, _ADAM, _CODE)),
  'gradient_jump': Kind(WARNING, (_RATE, _CLIP, _ADAM, _CODE)),
  'entropy_collapse': Kind(
    WARNING,
    (
      _RATE,
      ('clipping from above removes unlikely tokens', 'rl.learner.estimator.clip_high'),
      ('the tasks are solved, or too alike', 'tasks.weights'),
    ),
  ),
  'entropy_explosion': Kind(ERROR, (_RATE, _ADAM, ('the sign of the reward', ''))),
  'expert_imbalance': Kind(
    WARNING, (('the router bias follows too slowly', '{step}.bias_update_rate'), _RATE)
  ),
  'router_bias_frozen': Kind(
    WARNING,
    (
      ('the router bias is not updated', '{step}.bias_update_rate'),
      ('its update is missing, in code', ''),
    ),
  ),
  'router_bias_runs_away': Kind(
    ERROR,
    (
      ('the bias follows the load of other experts or layers, in code', ''),
      ('the router bias follows too slowly', '{step}.bias_update_rate'),
    ),
  ),
  'ratio_drift': Kind(
    WARNING,
    (
      _RATE,
      ('samples are too old', 'rl.capacity'),
      ('several updates on the same samples', 'rl.updates_per_batch'),
    ),
  ),
  'clipping': Kind(
    WARNING,
    (
      (_CAP, 'rl.learner.estimator.is_weight_max'),
      (_CAP, 'rl.learner.estimator.clip_high'),
      _RATE,
      ('samples are too old', 'rl.capacity'),
    ),
  ),
  'mismatch': Kind(
    ERROR,
    (
      ('experts differ: replay them', 'engine.record_experts'),
      ('keys of older weights are reused', 'scheduler.reuse_stale_prefix'),
      ('the engine rounds weights or cache', 'engine.weights_dtype'),
      ('an error in the engine, or weights of another version', ''),
    ),
    r'other log-probabilities|disagree',
  ),
  'reward_saturation': Kind(
    WARNING, (('the tasks are too easy for the policy', 'tasks.weights'),)
  ),
  'reward_absent': Kind(
    WARNING,
    (
      ('the tasks are too hard: no partial credit', 'rl.partial_credit'),
      ('the policy was not imitated for long enough', 'sft.loop.steps'),
      ('an error in the verifier or the parser', ''),
    ),
    r'(?i)verif|pars(?:e|ing)',
    effect=True,
  ),
  'loss_mask': Kind(
    ERROR, (('the loss mask trains context, or is shifted, in code', ''),)
  ),
  'zero_advantage': Kind(
    WARNING,
    (
      ('groups are too small to differ', 'rl.group_size'),
      ('the curriculum samples tasks that are solved or hopeless', 'rl.curriculum'),
    ),
    effect=True,
  ),
  'success_falls': Kind(
    ERROR,
    (
      ('the reward pays for something else than success', 'rl.learner.reward.alpha'),
      ('the sign of the reward, in code', ''),
      _RATE,
    ),
    effect=True,
  ),
  'reward_sign': Kind(
    ERROR,
    (
      ('a negative weight in the reward', 'rl.learner.reward.alpha'),
      ('speed is paid more than success', 'rl.learner.reward.beta'),
      ('the sign of the reward or advantage, in code', ''),
    ),
  ),
  'length_growth': Kind(
    WARNING,
    (
      ('length costs nothing', 'rl.learner.reward.beta'),
      ('the normaliser favours long answers', 'rl.learner.estimator.normaliser'),
      ('the limit of a response is high', 'episodes.agent.max_tokens'),
    ),
    effect=True,
  ),
  'weights_differ': Kind(
    ERROR,
    (
      ('a part of the new weights does not reach the engine', 'roles.engine_urls'),
      ('keys of older weights are reused', 'scheduler.reuse_stale_prefix'),
    ),
    r'(?i)weights|publish|version',
  ),
  'schedule_ended': Kind(
    ERROR,
    (
      ('the schedule is of a shorter run', '{optimizer}.schedule.total_steps'),
      ('it falls to zero', '{optimizer}.schedule.final_fraction'),
    ),
  ),
  'weights_not_published': Kind(
    ERROR,
    (('the engine does not take the new weights', 'roles.engine_urls'),),
    r'(?i)weights|publish|version',
  ),
  'staleness': Kind(
    WARNING,
    (
      ('the queue holds more items than updates can use', 'rl.capacity'),
      ('the window lets old items wait', 'rl.window'),
    ),
  ),
  'throughput_drop': Kind(
    WARNING, (_MACHINE, _AGENTS), r'(?i)slow|evict|memory|lost', effect=True
  ),
  'stuck': Kind(
    ERROR,
    (
      ('a process waits for one that is gone', 'roles.lease_s'),
      ('an episode without a deadline', 'rl.item_deadline_s'),
      ('the disk is full', ''),
    ),
    r'(?i)error|fail|lost|timeout|no space',
  ),
  'ended_early': Kind(
    WARNING,
    (('it was stopped or killed: the same command resumes', ''),),
    r'(?i)error|killed|signal|memory|no space',
  ),
  'pause': Kind(
    WARNING,
    (
      ('a process was away', 'roles.lease_s'),
      ('saving or compiling', 'rl.checkpoint_every'),
      _MACHINE,
    ),
    r'(?i)lost|timeout|compil|sav',
  ),
  'infrastructure': Kind(
    ERROR,
    (
      ('sandboxes cannot be created or run out of a limit', 'episodes.backend'),
      _AGENTS,
      ('the limits of the sandbox', 'episodes.limits'),
    ),
    r'(?i)infrastructure|sandbox|refused|timeout',
  ),
  'tool_failures': Kind(
    ERROR,
    (
      ("the tool's server is down or overloaded, or its limits are low", ''),
      _AGENTS,
    ),
    r'(?i)refused|timeout|unavailable',
  ),
  'failed_items': Kind(ERROR, (_DEADLINE, _AGENTS), r'item \d+ failed'),
  'dead_worker': Kind(
    ERROR,
    (('an agents process dies or is away', 'roles.lease_s'), _DEADLINE),
    r'(?i)reissue|lease|lost|gone',
  ),
  'window_blocked': Kind(
    WARNING,
    (
      ('stragglers hold the window', 'rl.window'),
      ('they may take long', 'rl.item_deadline_s'),
    ),
  ),
  'slow_storage': Kind(
    WARNING,
    (
      ('checkpoints are frequent or their storage slow', 'rl.checkpoint_every'),
      ('the disk is full or shared', ''),
    ),
    r'(?i)sav|checkpoint|no space',
  ),
  'low_disk': Kind(
    WARNING,
    (
      ('the disk is nearly full', ''),
      ('too many checkpoints are kept', 'rl.keep_every_steps'),
    ),
    r'(?i)no space|sav',
  ),
  'forks': Kind(
    WARNING,
    (
      ('the client drops reasoning', 'gateway.restore_reasoning'),
      ('the agent edits its context', 'episodes.agent.context.policy'),
      ('the client changes answers or their white space', ''),
    ),
    r'(?i)fork|retokenis',
  ),
  'retokenised': Kind(
    ERROR,
    (
      ('the client returns other text than it got', ''),
      ('the client drops reasoning', 'gateway.restore_reasoning'),
    ),
    r'(?i)fork|retokenis',
  ),
  'prefix_changed': Kind(
    ERROR, (('history was encoded again instead of extended, in code', ''),)
  ),
  'held_out_in_training': Kind(
    ERROR, (('the split of the tasks of RL or its source', 'tasks.kind'),)
  ),
  'tokenizer': Kind(
    ERROR,
    (
      ('weights and tokenizer are of different runs', 'init_from'),
      ('the same of a control', 'start'),
      ('tokenizer.json was replaced', ''),
    ),
  ),
  'damaged_pool': Kind(ERROR, (('the database was changed, or a disk fails', ''),)),
  'logged_errors': Kind(
    WARNING,
    (('see the lines', ''),),
    r'^[EF]\d{4} |^Traceback|\b(?:ERROR|FATAL)\b',
    effect=True,
  ),
}


def order(found: Finding) -> tuple[bool, bool]:
  """Sort key: what follows from others last, errors first."""
  return KINDS[found.kind].effect, found.severity != ERROR


def explained(found: Finding, config: Mapping[str, Any]) -> Finding:
  """The finding with severity and causes; fields that the run's config lacks are ''."""
  kind = KINDS[found.kind]
  fields = [(text, field_of(field, found.phase, config)) for text, field in kind.causes]
  seen, causes = set(), []
  for (text, template), (_, field) in zip(kind.causes, fields, strict=True):
    if template and not field and config:
      continue  # this run does not have it
    if field and field in seen:
      continue
    seen.add(field)
    causes.append(Cause(text, field))
  return dataclasses.replace(found, severity=kind.severity, causes=tuple(causes))


def field_of(template: str, phase: str, config: Mapping[str, Any]) -> str:
  """Dotted name of a cause's field in a run's config; '' if the config lacks it."""
  if not template:
    return ''
  optimizer, step = _OPTIMIZER.get(phase, 'optimizer'), _STEP.get(phase, 'step')
  rule = settings.get(config, f'{optimizer}.name')
  known = isinstance(rule, str) and re.fullmatch(r'\w+', rule)
  name = template.format(optimizer=optimizer, step=step, rule=rule if known else 'adam')
  missing = object()
  found = settings.get(config, name, missing) is not missing
  return name if found or not config else ''
