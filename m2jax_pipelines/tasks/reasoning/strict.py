"""The strict verifier of reasoning problems: right or wrong, nothing between.

An answer counts only as the content of exactly one `<answer>…</answer>`, with nothing
after it, and only if it equals the expected text; white space around it is ignored.
reasoning-gym's own scorers give partial credit to an answer that merely contains the
right one, and evaluate some answers as code (facts/pipelines.md §5): they are not used.

Only the standard library is used: the file is copied into each Harbor task.
"""

OPEN, CLOSE = '<answer>', '</answer>'
MAX_CHARS = 4096


def extract(message):
  """The answer in a message, or None if there is not exactly one at its end."""
  if message.count(OPEN) != 1 or message.count(CLOSE) != 1:
    return None
  before, _, after = message.partition(OPEN)
  answer, closed, rest = after.partition(CLOSE)
  if not closed or CLOSE in before or rest.strip(' \n'):
    return None
  return answer


def equal(answer, expected):
  """Whether the answer is the expected text."""
  if answer is None or len(answer) > MAX_CHARS:
    return False
  return bool(expected) and answer.strip(' \n') == expected


def main(work, expected_path, reward_path):
  """For Harbor tasks: judges a file that contains only the answer."""
  with open(expected_path, encoding='utf-8', newline='') as file:
    expected = file.read()
  try:
    with open(work, encoding='utf-8', newline='') as file:
      answer = file.read(MAX_CHARS + 1)
  except (OSError, UnicodeDecodeError):
    answer = None
  with open(reward_path, 'w', encoding='utf-8') as file:
    file.write(str(int(equal(answer, expected))))


if __name__ == '__main__':
  import sys

  main(*sys.argv[1:])
