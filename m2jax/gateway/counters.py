"""Counters of the gateway, and Prometheus' text format of them (version 0.0.4)."""

from __future__ import annotations

import collections

CONTENT_TYPE = 'text/plain; version=0.0.4; charset=utf-8'
HELP = {
  'requests_total': 'HTTP requests by the status of their response.',
  'completions_total': 'Recorded completions by why they ended.',
  'parsed_total': "Recorded completions by the parser's verdict.",
  'extensions_total': 'Prompts that extend a recorded completion.',
  'forks_total': 'Prompts that extend none, by why.',
  'closed_by_gateway_total': 'Truncated responses that the gateway ended in a prompt.',
  'reasoning_restored_total': 'Messages that got back the reasoning that was dropped.',
  'repeated_total': 'Requests that were recorded before.',
  'context_edits_total': 'Requests after an edit that the agent declared, by edit.',
  'request_classes_total': 'Requests whose client says what they are, by class.',
  'overrides_total': 'Sampling fields that a training session overrode.',
  'ignored_total': 'Fields of requests that were accepted without effect.',
  'prompt_tokens_total': 'Tokens of prompts.',
  'response_tokens_total': 'Sampled tokens.',
  'closed_connections_total': 'Connections that the gateway closed, by why.',
}


class Counters:
  """Counts by name and label. Written on the gateway's loop, read from any thread."""

  def __init__(self):
    self._counts: collections.Counter[str] = collections.Counter()

  def add(self, name: str, amount: int = 1, **label: str):
    """Adds to `name`, of HELP, or `name{label="value"}`."""
    for key, value in label.items():
      name = f'{name}{{{key}="{value}"}}'
    self._counts[name] += amount

  def as_dict(self) -> dict[str, int]:
    """A copy: `{'requests_total{status="200"}': 3, …}`."""
    return dict(self._counts)

  def exposition(self) -> str:
    """All counters that are not 0."""
    by_name = collections.defaultdict(list)
    for key, value in sorted(self.as_dict().items()):
      by_name[key.partition('{')[0]].append(f'gateway_{key} {value}\n')
    return ''.join(
      f'# HELP gateway_{name} {HELP[name]}\n# TYPE gateway_{name} counter\n'
      + ''.join(lines)
      for name, lines in by_name.items()
    )


def parse(text: str) -> dict[str, int]:
  """`Counters.as_dict` of an exposition.

  Raises:
    ValueError: the text is not an exposition.
  """
  lines = (line for line in text.splitlines() if line and not line.startswith('#'))
  parts = [line.rpartition(' ') for line in lines]
  return {name.removeprefix('gateway_'): int(value) for name, _, value in parts}
