"""A gang as one JobSet on GKE: each replica is a job, each of its hosts a pod.

Sources: JobSet's API jobset.x-k8s.io/v1alpha2 (as in kubeflow-trainer-api 2.3.0); what
xpk 1.16.0 requests for a TPU slice (commands/workload.py: node selectors,
google.com/tpu, toleration, exclusive topology); the coordinator of jax 0.10.2
(_src/clusters/k8s_cluster.py its host name, cloud_tpu_cluster.py its port). Number and
ids of JAX's processes come from variables that GKE sets in TPU pods:
TPU_WORKER_HOSTNAMES and TPU_WORKER_ID.

Unlike xpk's pods these are neither privileged nor on the host's network, because
agents' commands run in them. Exit code 2, which our jobs use for bad input and for
losses that stay NaN, is never retried. SIGTERM, which a pod gets before its machine is
taken, makes a job that trains save; `grace_s` is the time for it.
"""

from __future__ import annotations

import functools
from typing import Any

import yaml

from launch import config
from launch.config import Command, Launch, Role
from launch.topology import CHIPS_PER_HOST, GKE_ACCELERATOR

COORDINATOR_PORT = 8482
_EXCLUSIVE = 'alpha.jobset.sigs.k8s.io/exclusive-topology'
_BAD_INPUT = 2


def hostname(launch: Launch, instance: str) -> str:
  """The name of a replica's first host in the gang."""
  return f'{launch.name}-{instance}-0-0.{launch.name}'


def manifest(launch: Launch) -> dict[str, Any]:
  """The JobSet, ready for YAML."""
  launch.need('jobset', 'image')
  metadata: dict[str, Any] = {'name': launch.name}
  if launch.queue:
    metadata['labels'] = {'kueue.x-k8s.io/queue-name': launch.queue}
  first = [name for name, role in launch.instances() if role is launch.roles[0]]
  return {
    'apiVersion': 'jobset.x-k8s.io/v1alpha2',
    'kind': 'JobSet',
    'metadata': metadata,
    'spec': {
      'network': {'enableDNSHostnames': True, 'publishNotReadyAddresses': True},
      'successPolicy': {'operator': 'All', 'targetReplicatedJobs': first},
      'failurePolicy': {
        'maxRestarts': launch.max_restarts,
        'rules': [
          {
            'name': 'badInput',
            'action': 'FailJobSet',
            'onJobFailureReasons': ['PodFailurePolicy'],
          }
        ],
      },
      'replicatedJobs': [_job(launch, *instance) for instance in launch.instances()],
    },
  }


def _job(launch: Launch, name: str, role: Role) -> dict[str, Any]:
  pod: dict[str, Any] = {
    'restartPolicy': 'Never',
    'terminationGracePeriodSeconds': launch.grace_s,
    'containers': [_container(launch, name, role)],
  }
  template: dict[str, Any] = {}
  if role.slice:
    # One slice per node pool, and one job per node pool.
    template['metadata'] = {
      'annotations': {_EXCLUSIVE: 'cloud.google.com/gke-nodepool'}
    }
    pod['nodeSelector'] = {
      'cloud.google.com/gke-tpu-accelerator': GKE_ACCELERATOR,
      'cloud.google.com/gke-tpu-topology': role.slice.topology,
    }
    pod['tolerations'] = [{'key': 'google.com/tpu', 'operator': 'Exists'}]
  if launch.storage:
    claim = {'claimName': f'{launch.storage}-pvc'}  # xpk's name of the claim
    pod['volumes'] = [{'name': 'workdir', 'persistentVolumeClaim': claim}]
  on_exit = {'containerName': role.name, 'operator': 'In', 'values': [_BAD_INPUT]}
  template['spec'] = {
    'parallelism': role.hosts,
    'completions': role.hosts,
    'completionMode': 'Indexed',
    'backoffLimit': 0,
    'podFailurePolicy': {'rules': [{'action': 'FailJob', 'onExitCodes': on_exit}]},
    'template': {'spec': pod},
  }
  return {'name': name, 'replicas': 1, 'template': template}


def _container(launch: Launch, name: str, role: Role) -> dict[str, Any]:
  found = functools.partial(hostname, launch)
  argv = (*role.argv, *config.addresses(launch, name, role, found))
  container: dict[str, Any] = {
    'name': role.name,
    'image': launch.image,
    # Kubernetes expands $(NAME), and replaces $$ by $.
    'command': [arg.replace('$', '$$') for arg in argv],
  }
  if role.slice is None:
    container['env'] = [{'name': 'JAX_PLATFORMS', 'value': 'cpu'}]
  else:
    address = f'{hostname(launch, name)}:{COORDINATOR_PORT}'
    container['env'] = [{'name': 'JAX_COORDINATOR_ADDRESS', 'value': address}]
    container['resources'] = {'limits': {'google.com/tpu': CHIPS_PER_HOST}}
  if launch.storage:
    container['volumeMounts'] = [{'name': 'workdir', 'mountPath': launch.mount}]
  return container


def run(launch: Launch) -> list[Command]:
  """Configures kubectl for the cluster and creates the JobSet."""
  launch.need('jobset', 'cluster')
  credentials = (
    *('gcloud', 'container', 'clusters', 'get-credentials', launch.cluster),
    f'--location={launch.region}',
    f'--project={launch.project}',
  )
  text = yaml.safe_dump(manifest(launch), sort_keys=False, width=1000).strip()
  return [Command(credentials), Command(('kubectl', 'create', '--filename=-'), text)]


def watch(launch: Launch) -> list[Command]:
  """Shows the gang's pods and the log of the first role."""
  selector = f'--selector=jobset.sigs.k8s.io/jobset-name={launch.name}'
  job = f'job/{launch.name}-{launch.instances()[0][0]}-0'
  return [
    Command(('kubectl', 'get', 'pods', selector)),
    Command(('kubectl', 'logs', '--follow', job)),
  ]


def delete(launch: Launch) -> list[Command]:
  """Deletes the gang."""
  return [Command(('kubectl', 'delete', 'jobset', launch.name))]


STEPS = {'run': run, 'watch': watch, 'delete': delete}
