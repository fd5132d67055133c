"""Every name in the metric records: unit, meaning, and where it is shown.

Writers and readers share this table. `metrics.MetricsWriter` warns about a name that is
not in it. Plots, terminal view and report look up every name that they read here, so
that a misspelt one raises an error instead of leaving a plot empty. TensorBoard shows
the meanings as descriptions. To record a new metric, write it and add a line here;
tests/experiments/test_forge.py compares the table with what a run of the main job
writes.

A record also has the fields `schema`, `lineage`, `time_s`, `phase` and `step`, which
`metrics.py` explains. `group/*` matches every name that begins with `group/`.

Evaluation records, phase 'eval': for each split and temperature one record of the
family 'all', and one for each family and chain length (`calls`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from m2jax.observe import optimizer_names, sample_names

# Each phase counts its own steps.
PHASES = {
  'pretrain': 'pre-training; MTP expansion: all parameters together',
  'frozen': 'MTP expansion: the new modules only',
  'held_out': 'loss on held-out documents or chats at the end of a job',
  'frozen_held_out': 'loss on held-out documents between rounds of MTP expansion',
  'sft': 'supervised fine-tuning',
  'more_sft': 'more fine-tuning, a control of reinforcement learning',
  'rl': 'reinforcement learning: one record per update',
  'eval': 'evaluation in the real environment',
}
PLACES = ('plot', 'view', 'report')


class UnlistedMetric(UserWarning):
  """A record has a name or a phase that this module does not list."""


@dataclasses.dataclass(frozen=True)
class Metric:
  """One name.

  Attributes:
    name: key in the record.
    phases: phases whose records have it.
    unit: the value's unit; '1' is a plain number, 'text' a string.
    meaning: one line, shown next to the plot.
    shown: 'plot' and 'report' (a table) are in the report, 'view' is the terminal.
      Empty: in metrics.jsonl and TensorBoard only.
    when: condition under which records have it; empty if every run writes it.
  """

  name: str
  phases: tuple[str, ...]
  unit: str
  meaning: str
  shown: tuple[str, ...] = ()
  when: str = ''


_PRETRAIN = ('pretrain', 'frozen')
_SFT = ('sft', 'more_sft')
_LOOP = (*_PRETRAIN, *_SFT)  # phases of train.loop
_TRAIN = (*_LOOP, 'rl')
_PUBLISHES = 'the learner is a role of its own'
_SCORED = ('held_out', 'frozen_held_out')

_TRAINING = (
  Metric(
    'loss', ('rl',), '1', "the estimator's objective, minimised", ('plot', 'view')
  ),
  Metric('loss', _SFT, 'nats/token', 'loss of the trained tokens', ('plot', 'view')),
  Metric('loss', (*_PRETRAIN, *_SCORED), 'nats/token', 'loss of the main model'),
  Metric('entropy', ('rl',), 'nats', 'mean over sampled tokens', ('plot', 'view')),
  Metric('entropy', _SFT, 'nats', 'mean over trained tokens', ('view',)),
  Metric('entropy', (*_PRETRAIN, *_SCORED), 'nats', 'mean over trained tokens'),
  Metric(
    'mtp_loss',
    (*_TRAIN, *_SCORED),
    'nats/token',
    'mean over the MTP modules',
    when='the model has MTP modules',
  ),
  Metric(
    'draft_kl/*',
    (*_TRAIN, *_SCORED),
    'nats/token',
    'top-K KL of one MTP module from the main model',
    when='draft_top_k is set',
  ),
  Metric(
    'draft_overlap/*',
    (*_TRAIN, *_SCORED),
    '1',
    'Σ min(p, q) of main model and one MTP module over K words, mean over tokens',
    when='draft_top_k is set',
  ),
  Metric('tokens', _SCORED, 'tokens', 'tokens scored'),
  Metric('tokens', _LOOP, 'tokens', 'tokens trained since the previous record'),
  Metric('used_s', _TRAIN, 's', 'time spent in the phase, restarts included'),
  Metric('grad_norm', ('rl',), '1', 'norm of the gradient, before clipping', ('plot',)),
  Metric('grad_norm', _LOOP, '1', 'norm of the gradient, before clipping'),
  Metric(
    'skipped',
    _LOOP,
    'steps',
    'steps since the previous record that changed nothing: loss or gradient was not '
    'finite',
  ),
  Metric(
    'skipped',
    ('rl',),
    'passes',
    'passes that changed nothing: loss or gradient was not finite',
  ),
  Metric(
    'max_violation',
    _TRAIN,
    '1',
    'load of the busiest expert over the mean load − 1, mean over layers',
  ),
  Metric(
    'router_bias_rms',
    _TRAIN,
    '1',
    'root mean square of the router bias over layers and experts',
  ),
  *(
    Metric(f'trained/{role}', _SFT, 'share', f'share of the trained tokens that {of}')
    for role, of in (
      ('assistant', 'the assistant wrote'),
      ('tool', 'are of tool results'),
      ('user', 'are of user messages'),
      ('system', 'are of system prompts'),
    )
  ),
  Metric('trained/ends', _SFT, 'share', 'trained messages whose end is trained'),
  Metric('trained/assistant', ('rl',), 'share', 'sampled share of the trained tokens'),
  Metric('trained/prompt', ('rl',), 'share', 'share of them that is of prompts'),
  Metric(
    'checkpoint/save_s',
    _TRAIN,
    's',
    'time that training waited for saves since the previous record',
    when='it saved',
  ),
  Metric(
    'disk/free_bytes',
    _TRAIN,
    'bytes',
    "free space of the workdir's file system",
  ),
  Metric(
    'activation_max',
    _TRAIN,
    '1',
    'largest absolute value of the residual stream that enters a block or final norm',
    when='step.activation_max is set',
  ),
  Metric(
    'update_rms/*',
    _TRAIN,
    '1',
    'root mean square of the update of a kind of parameters',
  ),
  Metric('learning_rate/*', _PRETRAIN, '1', 'learning rate of one kind of parameters'),
  Metric('mtp_weight', _PRETRAIN, '1', "weight of the MTP loss in the stage's loss"),
  Metric('context', _PRETRAIN, 'tokens', 'row length of the stage'),
  Metric('consumed_tokens', _PRETRAIN, 'tokens', 'tokens trained since the start'),
  Metric(
    'epoch',
    _LOOP,
    'epochs',
    'passes over the data begun so far',
    when='the data is finite',
  ),
  Metric(
    'tokens_per_s',
    (*_SFT, 'rl'),
    'tokens/s',
    'tokens trained per second, after merging',
    ('plot', 'view'),
  ),
  Metric('tokens_per_s', _PRETRAIN, 'tokens/s', 'tokens trained per second'),
  Metric('progress', (*_SFT, 'rl'), 'share', 'finished share of the phase', ('view',)),
  Metric('progress', _PRETRAIN, 'share', 'finished share of the phase'),
)

_OPTIMIZER = tuple(
  Metric(f'{group}/{name}', _TRAIN, unit, meaning, when=when)
  for group, when, rows in optimizer_names.GROUPS
  for name, unit, meaning in rows
)

_RL = ('rl',)
_REWARD = (
  Metric(
    'success',
    _RL,
    'share',
    'successful share of the trajectories taken, by the verifier',
    ('plot', 'view'),
  ),
  Metric(
    'success/*',
    _RL,
    'share',
    'successful share of the trajectories taken of one family',
    ('plot',),
    when='the update took trajectories of the family',
  ),
  Metric('reward', _RL, '1', 'mean return of the trajectories taken', ('plot', 'view')),
  Metric('reward_process', _RL, '1', 'mean process reward, before α'),
  Metric('reward_speed', _RL, '1', 'mean speed reward, before β'),
  Metric('worst_family_success', _RL, 'share', "the curriculum's lowest average"),
  Metric('wall_s', _RL, 's', 'mean duration of an episode'),
  Metric(
    'parallel_calls',
    _RL,
    'share',
    'share of tool calls made in a turn with others',
    when='the agents called tools',
  ),
  Metric('turns', _RL, 'turns', 'mean number of trained turns of an episode'),
  Metric('groups', _RL, 'groups', 'groups taken by the update'),
  Metric(
    'groups_zero_advantage', _RL, 'groups', 'groups dropped: all returns are equal'
  ),
  Metric('groups_refilled', _RL, 'groups', 'groups taken to replace dropped ones'),
  Metric(
    'dropped_fraction',
    _RL,
    'share',
    'share of the trajectories taken that contribute no gradient',
  ),
  Metric('completions_unused', _RL, 'completions', 'untrained: no agent acted on them'),
  Metric(
    'groups_masked', _RL, 'groups', 'groups dropped: infrastructure failures only'
  ),
  Metric('trajectories', _RL, 'trajectories', 'trajectories taken by the update'),
  Metric('trajectories_masked', _RL, 'trajectories', 'masked: infrastructure failures'),
)

_OFF_POLICY = (
  Metric('ratio', _RL, '1', 'mean of π/π_old over tokens', ('plot', 'view')),
  Metric(
    'clip_fraction',
    _RL,
    'share',
    'share of tokens whose π/π_old is clipped',
    ('plot', 'view'),
  ),
  Metric('clipped_mass', _RL, '1', 'mean of π/π_old removed by clipping', ('plot',)),
  Metric('approx_kl', _RL, 'nats', 'estimate of KL(π_old ‖ π), per token', ('plot',)),
  Metric(
    'reference_kl',
    _RL,
    'nats',
    'estimate of KL(π ‖ the weights that RL started from), per token',
    when='the estimator asks for these weights',
  ),
  Metric(
    'distillation_kl/*',
    _RL,
    'nats',
    'KL(π ‖ teacher of the domain) per token: its estimate on sampled tokens, or a '
    'lower bound by its top K',
    when='rl.learner.distillation has teachers',
  ),
  Metric(
    'value/mean',
    _RL,
    '1',
    "mean of a critic's values over tokens, before the update",
    when='there is a critic',
  ),
  Metric(
    'value/loss',
    _RL,
    '1',
    'mean of (value − return)² over tokens, before the update',
    when='there is a critic',
  ),
  Metric(
    'value/explained_variance',
    _RL,
    '1',
    '1 − variance of (return − value) / variance of returns',
    when='there is a critic',
  ),
  Metric('abs_log_ratio', _RL, 'nats', 'mean of |log π/π_old| over tokens', ('plot',)),
  Metric(
    'mismatch/tokens',
    _RL,
    'tokens',
    'trained tokens of responses sampled entirely by the same weights',
  ),
  Metric(
    'mismatch/mean',
    _RL,
    'nats',
    'mean over these of |log-probability here − in the engine|',
    ('plot',),
    when='there are such tokens',
  ),
  Metric(
    'mismatch/max',
    _RL,
    'nats',
    'largest over these of |log-probability here − in the engine|',
    ('plot',),
    when='there are such tokens',
  ),
  Metric(
    'mismatch/mixed_tokens',
    _RL,
    'tokens',
    'trained tokens sampled by the same weights in responses begun by older ones',
  ),
  Metric(
    'mismatch/mixed_max',
    _RL,
    'nats',
    'largest difference over these, which attended to keys of the older weights',
    when='there are such tokens',
  ),
  Metric('old_logprob', _RL, 'nats', 'mean log-probability when sampled'),
  Metric(
    'policy/lag_mean',
    _RL,
    'versions',
    'versions behind the learner, mean over tokens',
    ('plot', 'view'),
  ),
  Metric(
    'policy/lag_max',
    _RL,
    'versions',
    'versions behind the learner, oldest token',
    ('plot', 'view'),
  ),
  Metric(
    'window/age_items_mean',
    _RL,
    'items',
    'items taken between submission and taking, mean',
    ('plot',),
  ),
  Metric(
    'window/age_items_max',
    _RL,
    'items',
    'items taken between submission and taking, largest',
    ('plot',),
  ),
  Metric(
    'window/order_distance_mean',
    _RL,
    'items',
    'distance from the head when taken, mean',
    ('plot',),
  ),
  Metric(
    'window/order_distance_max',
    _RL,
    'items',
    'distance from the head when taken, largest',
    ('plot',),
  ),
  Metric('window/occupancy', _RL, 'share', 'completed share of the window', ('plot',)),
)

_FLOW = (
  Metric(
    'pool/pending',
    _RL,
    'items',
    'items submitted and not yet completed',
    ('plot', 'view', 'report'),
  ),
  Metric(
    'pool/completed',
    _RL,
    'items',
    'items completed and not yet taken',
    ('plot', 'view', 'report'),
  ),
  Metric('pool/taken', _RL, 'items', 'items taken so far', ('view', 'report')),
  Metric('pool/failed', _RL, 'items', 'items failed so far', ('view', 'report')),
  Metric(
    'pool/pruned_completions',
    _RL,
    'completions',
    'completions whose token ids were deleted',
  ),
  Metric(
    'pool/missed_syncs', _RL, 'times', 'failed checkpoints of the write-ahead log'
  ),
  Metric(
    'pool/late_completions', _RL, 'completions', 'completions of items already retired'
  ),
  Metric(
    'pool/late_trajectories',
    _RL,
    'trajectories',
    'trajectories of items already retired',
  ),
  Metric('pool/reissued', _RL, 'items', 'attempts lost by agents, since the start'),
  Metric('input_tokens', _RL, 'tokens', 'tokens of the samples, before merging'),
  Metric('forest_tokens', _RL, 'tokens', 'tokens after merging'),
  Metric(
    'padding',
    _RL,
    'share',
    'share of the rows that is padding',
    when='a group is in rows',
  ),
  Metric('chunked_trees', _RL, 'groups', 'groups trained in chunks'),
  Metric(
    'replay/disagreement',
    _RL,
    'share',
    'share of shared tokens whose recorded experts differ',
    when='rollouts record expert ids',
  ),
  Metric(
    'replay/rerouted',
    _RL,
    'share',
    'share of tokens with recorded experts for which a router would choose others',
    when='rollouts record expert ids',
  ),
  Metric(
    'rollouts_per_s',
    _RL,
    'episodes/s',
    'episodes finished per second',
    ('plot', 'view'),
  ),
  Metric('wait_s', _RL, 's', 'time the update waited for items'),
  Metric('train_s', _RL, 's', 'time from groups to new weights'),
  Metric('step_s', _RL, 's', 'time from one update to the next'),
  Metric(
    'engine/tokens_per_s',
    _RL,
    'tokens/s',
    'tokens sampled per second',
    ('plot', 'view', 'report'),
  ),
  Metric(
    'engine/queue_length', _RL, 'requests', 'requests waiting', ('view', 'report')
  ),
  Metric('engine/active_slots', _RL, 'slots', 'slots in use', ('view', 'report')),
  Metric(
    'engine/version',
    _RL,
    'version',
    'version of the weights that the engine samples with',
  ),
  Metric(
    'engine/update_pause_s', _RL, 's', 'pause of decoding at the last change of weights'
  ),
  *(
    Metric(f'weights/{name}', _RL, unit, meaning, when=_PUBLISHES)
    for name, unit, meaning in (
      ('published_bytes', 'bytes', "size of the new weights' arrays"),
      ('published_whole_bytes', 'bytes', 'size of their full checkpoint; 0 if none'),
      ('published_delta_bytes', 'bytes', 'size of their delta'),
      ('publish_s', 's', 'time the learner took to publish them'),
    )
  ),
  Metric(
    'engine/acceptance/*',
    _RL,
    'share',
    'accepted share of the drafts at one position, given that those before were',
    when='the engine drafts',
  ),
  Metric(
    'gateway/forks',
    _RL,
    'requests',
    'requests that do not extend a recorded completion of their session',
    ('view', 'report'),
  ),
  Metric(
    'gateway/overrides',
    _RL,
    'fields',
    'fields of requests overridden for training',
    ('view', 'report'),
  ),
  Metric(
    'memory/rss_bytes', _RL, 'bytes', 'resident memory of the process', ('plot', 'view')
  ),
)

_EVAL = ('eval',)
_EVALUATION = (
  Metric(
    'stage',
    _EVAL,
    'text',
    "'after SFT', 'after more SFT', 'after RL'; 'during RL' with the update as step",
    ('plot', 'report'),
  ),
  Metric(
    'split',
    _EVAL,
    'text',
    "'held_out' or 'dev'",
    ('plot', 'report'),
  ),
  Metric('temperature', _EVAL, '1', 'sampling temperature; 0 is greedy', PLACES),
  Metric('family', _EVAL, 'text', "family of the tasks; 'all' is their sum", PLACES),
  Metric(
    'calls',
    _EVAL,
    'calls',
    'chain length: number of tool calls that suffice',
    ('plot', 'report'),
    when="the family is not 'all'",
  ),
  Metric('successes', _EVAL, 'tasks', 'tasks solved', PLACES),
  Metric('n', _EVAL, 'tasks', 'tasks attempted', PLACES),
  Metric('wall_s', _EVAL, 's', 'mean duration of an episode'),
  Metric(
    'parallel_calls',
    _EVAL,
    'share',
    'share of tool calls made in a turn with others',
    when='the agents called tools',
  ),
)

_SAMPLES = tuple(Metric(name, _RL, *of) for name, of in sample_names.ROWS.items())
_ALL_OF_RL = (*_REWARD, *_OFF_POLICY, *_FLOW, *_SAMPLES)
METRICS = (*_TRAINING, *_OPTIMIZER, *_ALL_OF_RL, *_EVALUATION)

_INDEX = {(phase, m.name): m for m in METRICS for phase in m.phases}
_ALL_NAMES = frozenset(m.name for m in METRICS)


def find(phase: str, name: str) -> Metric | None:
  """The metric of a record's key, None where it is not listed."""
  exact = _INDEX.get((phase, name))
  if exact is not None or '/' not in name:
    return exact
  return _INDEX.get((phase, f'{name.partition("/")[0]}/*'))


def metric(phase: str, name: str) -> Metric:
  """The metric of a record's key, for readers.

  Raises:
    KeyError: it is not listed.
  """
  found = find(phase, name)
  if found is None:
    raise KeyError(f'{name!r} of phase {phase!r} is not in m2jax/observe/names.py')
  return found


def checked(name: str) -> str:
  """Returns the name, for a reader that accepts it from any phase.

  Raises:
    KeyError: no phase has it.
  """
  if name not in _ALL_NAMES:
    raise KeyError(f'{name!r} is not in m2jax/observe/names.py')
  return name


def group(prefix: str, place: str) -> list[str]:
  """Names `prefix/…` that are shown at `place`, in table order."""
  start = f'{prefix}/'
  return [m.name for m in METRICS if m.name.startswith(start) and place in m.shown]


def unlisted(phase: str, keys: Iterable[str]) -> list[str]:
  """Descriptions of the keys that the table lacks, or of the phase if it lacks that."""
  if phase not in PHASES:
    return [f'phase {phase!r}']
  return [f'{key!r} of phase {phase!r}' for key in keys if find(phase, key) is None]
