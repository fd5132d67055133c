"""Records the output of third-party tools in recorded.json next to this file.

  python -m tests.launch.record    # in an environment with xpk; gcloud, kubectl on PATH

Only help texts and dry runs, with both tools' usage reports switched off.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import yaml

RECORDED = pathlib.Path(__file__).with_name('recorded.json')
GCLOUD = (
  'artifacts repositories create',
  'auth configure-docker',
  'compute tpus queued-resources create',
  'compute tpus queued-resources delete',
  'compute tpus queued-resources describe',
  'compute tpus tpu-vm create',
  'compute tpus tpu-vm delete',
  'compute tpus tpu-vm describe',
  'compute tpus tpu-vm ssh',
  'compute tpus tpu-vm versions list',
  'container clusters get-credentials',
  'services enable',
  'storage buckets create',
  'storage cp',
  'storage rsync',
)
GCLOUD_WIDE = ['--project', '--quiet']
XPK = (
  'cluster create',
  'cluster delete',
  'storage create',
  'storage delete',
  'workload create',
  'workload delete',
  'workload list',
)
KUBECTL = ('create', 'delete', 'get', 'logs')


def _output(*argv: str) -> str:
  with tempfile.TemporaryDirectory() as empty:  # no account, no settings
    env = {
      **os.environ,
      'CLOUDSDK_CONFIG': empty,
      'CLOUDSDK_CORE_DISABLE_USAGE_REPORTING': 'true',
      'KUBECONFIG': f'{empty}/none',
      'TELEMETRY_ENABLED': 'false',  # xpk's, else sent after every command
    }
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
  return re.sub(r'\x1b\[[0-9;]*m', '', done.stdout)


def _flags(text: str) -> list[str]:
  return sorted(set(re.findall(r'(?<![\w-])--[a-z][a-z_-]+', text)))


def _gcloud(command: str) -> list[str]:
  """The flags of a command's synopsis."""
  text = _output('gcloud', *command.split(), '--help')
  synopsis = text.partition('SYNOPSIS')[2].partition('\nDESCRIPTION')[0]
  return _flags(synopsis) + GCLOUD_WIDE


def _manifest(xpk: str, device: str) -> dict:
  """The JobSet that xpk makes for one slice."""
  with tempfile.TemporaryDirectory() as directory:
    path = f'{directory}/manifest.yaml'
    where = ('--cluster=c', '--project=p', '--zone=us-east5-a', f'--tpu-type={device}')
    how = ('--dry-run', '--skip-validation', f'--output-manifest-file={path}')
    what = ('--workload=first', '--docker-image=image', '--command=true')
    _output(xpk, 'workload', 'create', *where, *how, *what)
    return yaml.safe_load(pathlib.Path(path).read_text())


def main() -> None:
  from xpk.core import system_characteristics

  xpk = str(pathlib.Path(sys.executable).with_name('xpk'))
  systems = system_characteristics.UserFacingNameToSystemCharacteristics
  recorded = {
    'gcloud': _output('gcloud', 'version').splitlines()[0],
    'kubectl': _output('kubectl', 'version', '--client').splitlines()[0],
    'xpk': _output(sys.executable, '-m', 'pip', 'show', 'xpk').splitlines()[1],
    'flags': {
      **{f'gcloud {c}': _gcloud(c) for c in GCLOUD},
      **{f'xpk {c}': _flags(_output(xpk, *c.split(), '--help')) for c in XPK},
      **{f'kubectl {c}': _flags(_output('kubectl', c, '--help')) for c in KUBECTL},
    },
    'slices': {
      name: [system.topology, system.vms_per_slice, system.chips_per_vm]
      for name, system in systems.items()
      if name.startswith('v5p-')
    },
    'jobsets': {d: _manifest(xpk, f'v5p-{d}') for d in ('2x2x1', '4x4x4')},
  }
  lines = [f'{json.dumps(k)}: {json.dumps(v)}' for k, v in recorded.items()]
  RECORDED.write_text('{\n' + ',\n'.join(lines) + '\n}\n')


if __name__ == '__main__':
  main()
