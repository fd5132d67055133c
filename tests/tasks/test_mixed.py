"""Several domains in one run: specs, ratios per stage, agents, teachers."""

import asyncio
import collections

import pytest

from configs import forge_mixed
from experiments import common
from m2jax import tasks
from m2jax.agents import agent as agent_lib
from m2jax.agents import episodes, whitebox
from m2jax.agents import mixed as mixed_agents
from m2jax.forge import evaluation, prepare
from m2jax.forge.config import ForgeConfig
from m2jax.forge.curriculum import Curriculum, CurriculumConfig
from m2jax.tasks import demonstrations, mixed
from m2jax_pipelines.tasks import lookup
from tests.gateway.conftest import response_text, serve, tok

__all__ = ['serve', 'tok']


def two(**options):
  """Two domains of lookups, of different lengths."""
  domains = {
    'short': lookup.Config(hops=(2, 2)),
    'long': lookup.Config(hops=(3, 4)),
  }
  return mixed.Config(domains=domains, **options)


def test_specs_make_the_domains_tasks():
  """A spec names domain and task; evaluations take the domains in turn, each with the
  tasks that its kind alone would have."""
  config = two()
  specs = [tasks.spec(config, 'held_out', i) for i in range(6)]
  made = [tasks.make(spec) for spec in specs]
  assert [task.domain for task in made] == ['short', 'long'] * 3
  assert [task.spec for task in made] == specs
  alone = [tasks.spec(config.domains['long'], 'held_out', i) for i in range(3)]
  assert [task.task.spec for task in made[1::2]] == alone
  for task in made:
    assert task.family == f'{task.domain}/hops_{task.baseline_calls}'
    assert tasks.make(task.task.spec).instruction == task.instruction


def test_ratios_of_each_stage():
  """Work items are drawn from the domains in the ratio of their stage; a family's share
  of its domain does not depend on how many families another domain has."""
  config = two(ratios={'short': (3.0, 0.0), 'long': (1.0,)}, stages=(400,))
  curriculum = Curriculum(CurriculumConfig(), tasks.families(config))
  drawn = collections.defaultdict(collections.Counter)
  for index in range(800):
    family = curriculum.draw(f'0/{index}', tasks.families(config, index))
    spec = tasks.spec(config, 'train', index, family=family)
    drawn[index >= 400][tasks.make(spec).domain] += 1
  assert 0.68 < drawn[False]['short'] / 400 < 0.82
  assert drawn[True] == {'long': 400}


def test_a_work_item_knows_its_stage():
  """The stage is in the spec, so that a group that is issued again has the same; it
  does not change the task. Demonstrations and evaluations are of no stage."""
  config = two(stages=(4, 6))
  families = tasks.families(config)
  drawn = [
    tasks.spec(config, 'train', index, family=next(iter(families)))
    for index in range(8)
  ]
  assert [mixed.stage_of(spec) for spec in drawn] == [0, 0, 0, 0, 1, 1, 2, 2]
  for index, spec in enumerate(drawn):
    plain = tasks.spec(two(), 'train', index, family=next(iter(families)))
    assert mixed.stage_of(plain) is None
    task, other = tasks.make(spec), tasks.make(plain)
    assert (task.spec, task.family, task.domain) == (spec, other.family, 'short')
    assert task.instruction == other.instruction
  for split in ('train', 'held_out'):
    assert mixed.stage_of(tasks.spec(config, split, 7)) is None


def test_contexts_of_each_stage():
  """A domain's episodes have the context of their stage; those of no stage, such as
  evaluations, the last one. A domain without has the engine's."""
  agent = mixed_agents.Config(
    domains={name: whitebox.Config(system=name) for name in ('short', 'long')},
    contexts={'long': (300, 500)},
  )
  tokens = {
    spec: agent.of_task(f'mixed/{spec}/lookup/train/hops_3/0/0').context.tokens
    for spec in ('long@0', 'long@1', 'long@2', 'long', 'short@0', 'short')
  }
  assert tokens == {
    **{'long@0': 300, 'long@1': 500, 'long@2': 500, 'long': 500},
    **{'short@0': 0, 'short': 0},
  }
  assert agent.of_task('mixed/long@0/lookup/train/hops_3/0/0').system == 'long'


@pytest.mark.parametrize(
  'contexts', [{'other': (300,)}, {'long': (-1,)}, {'long': ()}, {'black': (300,)}]
)
def test_bad_contexts_are_named(contexts):
  domains = {'long': whitebox.Config(), 'black': agent_lib.AgentConfig('other')}
  with pytest.raises(ValueError, match=r'Config\.contexts='):
    mixed_agents.Config(domains=domains, contexts=contexts)


def test_shares_of_the_demonstrations():
  """Of domains, or of families; a domain with families has no others there, while
  work items and evaluations have them."""
  config = two(demonstrated={'long/hops_3': 3.0})  # and short 1
  specs = [tasks.spec(config, 'train', i) for i in range(400)]
  drawn = collections.Counter(tasks.make(spec).family for spec in specs)
  assert drawn.keys() == {'short/hops_2', 'long/hops_3'}
  assert 0.68 < drawn['long/hops_3'] / 400 < 0.82
  assert tasks.families(config)['long/hops_4'] > 0
  held_out = [tasks.make(tasks.spec(config, 'held_out', i)).family for i in range(40)]
  assert 'long/hops_4' in held_out


@pytest.mark.parametrize(
  'options, said',
  [
    (dict(ratios={'short': (0.0,), 'long': (0.0,)}), 'ratios'),
    (dict(ratios={'other': (1.0,)}), 'ratios'),
    (dict(ratios={'long/hops_3': (1.0,)}), 'ratios'),
    (dict(demonstrated={'other/hops_3': 1.0}), 'demonstrated'),
    (dict(demonstrated={'long': 1.0, 'long/hops_3': 1.0}), 'demonstrated'),
    (dict(stages=(5, 3)), 'stages'),
  ],
)
def test_bad_settings_are_named(options, said):
  """Each error names the field."""
  with pytest.raises(ValueError, match=f'Config.{said}='):
    two(**options)


def test_the_config_shows_each_domain_in_its_scaffold():
  """SFT's chats of one task differ between scaffolds, and only as these say."""
  config = common.build(ForgeConfig, forge_mixed.get_config('smoke'))
  spec = 'mixed/repair/repair/train/steps_2/0/1?3'
  options = dict(backend='namespaces', limits=config.episodes.limits)
  demos = asyncio.run(demonstrations.collect([spec], config.teacher, **options))
  assert demos[0].success == 1.0 and demos[0].task == spec
  [chat] = prepare.chats(config, demos)
  assert chat.messages[0]['content'] == 'Use the tools.'
  call = {'function': {'name': 'sh', 'arguments': '{"cmd": "ls"}'}, 'id': 'c'}
  messages = [
    {'role': 'user', 'content': 'do it'},
    {'role': 'assistant', 'content': '', 'tool_calls': [call]},
  ]
  tool = tasks.make('terminal/train/steps_1/0/0').tools
  shown = {}
  for domain in ('shell', 'bash'):
    agent = config.episodes.agent.of_task(f'mixed/{domain}/terminal/train/x/0/0')
    [shown[domain]] = agent.shown(messages, tool)
  assert shown['shell'].messages[0]['content'] == 'Use sh.'
  assert shown['bash'].messages[1]['content'] == 'Your task: do it'
  [renamed] = shown['bash'].messages[2]['tool_calls']
  assert renamed['function'] == {'name': 'bash', 'arguments': '{"command": "ls"}'}
  assert shown['bash'].tools[0]['function']['parameters']['required'] == ['command']


@pytest.mark.parametrize('variant', ['', *forge_mixed.DOMAINS])
def test_variants_train_on_one_domain(variant):
  """All but it have no work items; demonstrations and evaluations stay the same."""
  job = common.build(ForgeConfig, forge_mixed.get_config(variant))
  config = job.tasks
  contexts = job.episodes.agent.contexts
  assert contexts.keys() == config.domains.keys()
  for grown in contexts.values():
    assert list(grown) == sorted(grown) and grown[-1] <= job.engine.context_tokens
  drawn = {
    name.split('/')[0]
    for name, ratio in tasks.families(config, index=200).items()
    if ratio > 0
  }
  assert drawn == ({variant} if variant else set(forge_mixed.DOMAINS))
  everything = common.build(ForgeConfig, forge_mixed.get_config()).tasks
  assert config.demonstrated == everything.demonstrated
  assert config.domains == everything.domains


def test_episodes_by_domain(serve, tok):
  """Each domain's agent acts, and evaluations are tallied by domain."""
  config = two()
  specs = [tasks.spec(config, 'held_out', i) for i in range(4)]
  values = forge_mixed.get_config('smoke').episodes.to_dict()
  values['agent'] = {
    'kind': 'mixed',
    'domains': {
      'short': {'kind': 'whitebox', 'system': 'S'},
      'long': {'kind': 'whitebox', 'rename': {'look': 'get'}},
    },
  }
  made = {(t.domain, t.instruction): t for t in map(tasks.make, specs)}

  def policy(request):
    prompt = tok.decode(request.prompt_ids)
    domain = 'long' if '"name": "get"' in prompt else 'short'
    [task] = [t for (of, text), t in made.items() if of == domain and text in prompt]
    turns, shown = mixed.lesson(task, TEACHERS, []), None
    results = prompt.split('<response>')[1:]
    try:
      for shown in [None, *(r.partition('</response>')[0] for r in results)]:
        turn = turns.send(shown)
    except StopIteration as end:
      return tok.encode(response_text('x', end.value.content))
    name = 'get' if domain == 'long' else 'look'
    return tok.encode(response_text('x', calls=[(name, turn.arguments)]))

  gateway, _, _ = serve(policy)
  settings = common.build(episodes.EpisodeConfig, values)
  with episodes.Runner(settings, gateway.base_url, gateway.sessions) as runner:
    out = episodes.evaluate(runner, specs)
  assert [t.domain for t in out] == ['short', 'long'] * 2
  assert [t.success for t in out] == [1.0] * 4, out
  tallies = evaluation.tally(out)
  assert [(t.family, t.calls, t.n) for t in tallies[:1]] == [('all', None, 4)]
  by_domain = {t.family: t.n for t in tallies if t.calls is None}
  assert by_domain == {'all': 4, 'short': 2, 'long': 2}


TEACHERS = mixed.TeacherConfig(
  domains={name: lookup.TeacherConfig() for name in ('short', 'long')}
)
