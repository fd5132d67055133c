"""The docker command, against podman's service of the Docker Engine API.

That service cannot map the users of a container for this client, which is one of the
checks. The others run without that check: files then belong to root outside too. Nor
does it answer `docker commit`, so that snapshots are not tried.
"""

from __future__ import annotations

import shutil
import subprocess

import pytest

from m2jax import sandbox
from m2jax.sandbox.containers import enforcement, engines, images

pytestmark = pytest.mark.long


@pytest.fixture(scope='module')
def docker(podman, image, tmp_path_factory):
  """The name of an image; docker's client talks to a service of its own."""
  if not shutil.which('docker'):
    pytest.skip('no docker client: apt-get install docker.io')
  place = tmp_path_factory.mktemp('docker')
  ulimits = 'default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]'
  with open(podman['CONTAINERS_CONF']) as file:
    conf = file.read().replace('[containers]', f'[containers]\n{ulimits}')
  (place / 'containers.conf').write_text(conf)
  environment = {**podman, 'CONTAINERS_CONF': str(place / 'containers.conf')}
  address = f'unix://{place}/socket'
  service = subprocess.Popen(
    ['podman', 'system', 'service', '--time=0', address],
    env=environment,
    stderr=subprocess.PIPE,
    text=True,
  )
  podman['DOCKER_HOST'] = address
  while not (place / 'socket').exists():
    assert service.poll() is None, service.stderr.read()
  yield image
  del podman['DOCKER_HOST']
  service.terminate()
  service.communicate()


def test_without_a_map_of_users_there_is_no_sandbox(run, docker):
  assert engines.unavailable('docker') == ''
  with pytest.raises(sandbox.SandboxUnavailable, match='userns-remap'):
    run(sandbox.create(backend='docker', image=docker))


def test_a_sandbox_of_docker(run, docker, make, monkeypatch):
  honest = enforcement.outside
  monkeypatch.setattr(
    enforcement, 'outside', lambda *a: honest(*a) or 1 if a[2] == 0 else honest(*a)
  )
  box = make(
    backend='docker',
    image=docker,
    limits=sandbox.Limits(processes=30, memory_bytes=64 << 20),
    contents={'/app/a': b'1'},
  )
  result = run(box.exec('cat /app/a; echo err >&2; exit 125'))
  assert (result.returncode, result.stdout, result.stderr) == (125, '1', 'err\n')
  assert run(box.exec('sleep 300', 0.3)).timed_out
  assert run(box.exec('head -c 300M /dev/zero | tail -c 290M | wc -c')).oom
  assert run(box.exec('f() { f | f & }; f; sleep 1', 5.0)).returncode is not None
  run(box.kill_processes())
  run(box.write('/app/b', b'2'))
  assert run(box.copy_out('/app')) == {'a': b'1', 'b': b'2'}
  run(box.exec('(sleep 300) >/dev/null 2>&1 & ln -s /etc/passwd /app/l'))
  run(box.kill_processes())
  with pytest.raises(sandbox.SandboxPathError):
    run(box.read('/app/l'))
  with run(box.listen(8123)):
    assert run(box.exec('exec 3<>/dev/tcp/127.0.0.1/8123')).returncode == 0


def test_docker_builds_images(run, docker, tmp_path):
  (tmp_path / 'Dockerfile').write_text(f'FROM {docker}\nRUN echo 1 > /f\n')
  name = run(images.build(tmp_path, engine='docker', network='none'))
  assert run(images._id('docker', name))
  assert name in run(images.prune('docker', keep_bytes=1))
