"""Sets up an empty Google Cloud project: APIs, a bucket, a registry, the image.

Flags: gcloud 528.0.0 (`gcloud … --help`), docker. No offline tool can check the names
of the services.
"""

from __future__ import annotations

from launch.config import Command, Launch, LaunchError

_SERVICES = (
  'artifactregistry.googleapis.com',
  'container.googleapis.com',
  'file.googleapis.com',
  'storage.googleapis.com',
  'tpu.googleapis.com',
)


def setup(launch: Launch) -> list[Command]:
  """Enables APIs; creates bucket and registry."""
  launch.need('setup', 'bucket', 'image')
  host, repository = _registry(launch.image)
  project = f'--project={launch.project}'
  location = f'--location={launch.region}'
  create = ('gcloud', 'artifacts', 'repositories', 'create', repository)
  return [
    Command(('gcloud', 'services', 'enable', *_SERVICES, project)),
    Command(
      ('gcloud', 'storage', 'buckets', 'create', launch.bucket, location, project)
    ),
    Command((*create, '--repository-format=docker', location, project)),
    Command(('gcloud', 'auth', 'configure-docker', host)),
  ]


def image(launch: Launch) -> list[Command]:
  """Builds the image of the working tree and pushes it."""
  launch.need('docker', 'image')
  tag = f'--tag={launch.image}'
  return [
    Command(('docker', 'build', '--file=launch/Dockerfile', tag, '.')),
    Command(('docker', 'push', launch.image)),
  ]


def _registry(image: str) -> tuple[str, str]:
  """Host and repository of an image in the Artifact Registry."""
  parts = image.split('/')
  if len(parts) != 4 or not parts[0].endswith('-docker.pkg.dev'):
    raise LaunchError(
      f'image {image!r}: must be REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME:TAG'
    )
  return parts[0], parts[2]


STEPS = {'setup': setup, 'image': image}
