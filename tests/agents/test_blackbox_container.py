"""A command as the agent of a task in a container; skipped without podman."""

from __future__ import annotations

import textwrap

import pytest

from m2jax import sandbox
from m2jax.agents import blackbox, episodes, whitebox
from m2jax.tasks import harbor, task
from tests.gateway.conftest import response_text
from tests.tasks import foreign

_REASON = foreign.unavailable()
pytestmark = [
  pytest.mark.long,
  pytest.mark.skipif(bool(_REASON), reason=_REASON or 'podman is here'),
]
LIMITS = sandbox.Limits(memory_bytes=256 << 20, wall_s=60.0)
# A client that needs nothing but bash, and cannot reach anything else.
COMMAND = textwrap.dedent(r"""
  body='{"model": "any", "messages": [{"role": "user", "content": "do it"}]}'
  exec 3<> /dev/tcp/127.0.0.1/8080
  printf 'POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n' >&3
  printf 'Content-Type: application/json\r\nContent-Length: %d\r\n\r\n' ${#body} >&3
  printf %s "$body" >&3
  cat <&3 > /tmp/reply
  grep -q 'write right' /tmp/reply && echo right > out.txt
  (exec 4<> /dev/tcp/1.1.1.1/53) 2> /dev/null && echo wrong > out.txt
  echo "$MODEL $TASK"
""")


@pytest.fixture
def spec(tmp_path):
  image = foreign.base(tmp_path)
  dataset = foreign.write(tmp_path / 'task')
  job = harbor.Containers(replace={foreign.BASE: image})
  config = harbor.Config(dataset=str(dataset), containers=job)
  return task.spec(config, 'train', 0)


def played(gateway, agent, spec, limits=LIMITS):
  config = episodes.EpisodeConfig(agent=agent, limits=limits)
  with episodes.Runner(config, gateway.base_url, gateway.sessions) as runner:
    [found] = runner.group(spec, 1).result(300)
  return found


def test_a_command_reaches_the_model_alone(serve, spec):
  gateway, _, _ = serve(response_text('so', 'write right'), accept_unknown_keys=False)
  agent = blackbox.BlackboxConfig(command=COMMAND)
  found = played(gateway, agent, spec)
  assert (found.end_reason, found.success) == ('answer', 1.0), found
  assert 'm2jax Write right into' in found.answer and found.error == ''


def test_a_white_box_agent_acts_in_the_container(serve, spec, tok):
  turns = iter([
    response_text('try', calls=[('sh', {'cmd': 'pwd; echo wrong > out.txt'})]),
    response_text('so', 'done'),
  ])  # fmt: skip
  policy = lambda request: tok.encode(next(turns))
  gateway, _, _ = serve(policy, accept_unknown_keys=False)
  found = played(gateway, whitebox.WhiteboxConfig(max_tokens=400), spec)
  assert (found.end_reason, found.success) == ('answer', 0.0), found
  [shown] = [m['content'] for m in found.messages if m['role'] == 'tool']
  assert shown == '/app'
  # What test.sh printed is on the trajectory's page.
  assert 'checked 0' in found.error
