"""An empty Google Cloud project → APIs, a bucket, an image registry, the image.

Flags: gcloud 528.0.0 (`gcloud … --help`), docker. The names of the services are not
checked by any tool that works offline.
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
  """APIs, bucket, registry."""
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
  """Builds the working tree's image and pushes it."""
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
      f'image {image!r}: want REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME:TAG'
    )
  return parts[0], parts[2]


STEPS = {'setup': setup, 'image': image}
