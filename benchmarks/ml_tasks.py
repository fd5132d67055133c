"""The table of docs/ml_tasks.md: data, sizes and medals of made ML tasks.

python -m benchmarks.ml_tasks --dataset=workdir/ml
"""

from __future__ import annotations

from pathlib import Path

from absl import app, flags

from m2jax.tasks import harbor

DATASET = flags.DEFINE_string('dataset', 'workdir/ml', 'What make_tasks wrote.')
_COLUMNS = (
  *('task', 'kind', 'data', 'train', 'test', 'metric', 'constant'),
  *('bronze', 'silver', 'gold', 'best rung'),
)


def table(dataset: Path) -> list[str]:
  """Lines of a Markdown table, a row a task."""
  lines = [f'| {" | ".join(_COLUMNS)} |', '|---' * len(_COLUMNS) + '|']
  for path in sorted(dataset.glob('tasks/*/ml-*')):
    found = harbor.read(path).metadata
    facts, best = found.details, found.details['best']
    cells = [path.name.removeprefix('ml-'), found.family]
    cells += [f'{found.source["name"]} {found.source["version"]}']
    cells += [str(count) for count in facts['rows']] + [facts['metric']]
    medals = [facts[n] for n in ('baseline', 'bronze', 'silver', 'gold')]
    cells += [f'{value:.3f}' for value in medals]
    cells += [f'{best} {facts["ladder"][best]:.3f}']
    lines.append(f'| {" | ".join(cells)} |')
  return lines


def main(argv):
  del argv
  print('\n'.join(table(Path(DATASET.value))))


if __name__ == '__main__':
  app.run(main)
