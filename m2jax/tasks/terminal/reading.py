"""Families that ask about the workspace: the answer is judged, no file may change.

Each has a `build` that draws the task and computes its answer in Python from the files,
and a `teach` that solves it with commands.
"""

from __future__ import annotations

import re

from m2jax.tasks.terminal.draw import (
  Answer,
  Call,
  Draft,
  Draw,
  Family,
  Files,
  Redraw,
  a_word,
  first_line,
  lines_with,
  size_bytes,
)


def _build_count_lines(draw: Draw) -> Draft:
  files = draw.files()
  file = draw.any_file(files)
  ask = draw.pick(
    (
      'How many lines are in {}?',
      'Count the lines of {}.',
      'What is the line count of {}?',
    )
  )
  params = {'file': file, 'other': draw.other_file(files, file)}
  return Draft(ask.format(file), files, params, 1, str(len(files[file])))


def _teach_count_lines(p, slip):
  option = '-c' if slip('wrong_option') else '-l'
  file = p['other'] if slip('wrong_file') else p['file']
  printed = yield Call('count lines', f'wc {option} < {file}')
  return Answer('that is it', first_line(printed))


def _build_count_matches(draw: Draw) -> Draft:
  files = draw.files()
  file = draw.any_file(files)
  word = draw.plant(files, file, 4, 16)
  # Exact, capitalised and longer forms, so that every option changes the count.
  lines, found = files[file], lines_with(files, file, word)
  longer = word + draw.pick(('s', 'ed', '_'))
  forms = [word, word, word.capitalize(), longer]
  forms += [draw.pick(forms) for _ in found[len(forms) :]]
  draw.rng.shuffle(forms)
  for i, form in zip(found, forms, strict=True):
    lines[i - 1] = lines[i - 1].replace(word, form)
  option = draw.pick(('', 'i', 'w', 'i', 'w'))
  flags = {'': 0, 'i': re.IGNORECASE, 'w': 0}
  pattern = {'': word, 'i': word, 'w': rf'\b{word}\b'}
  counts = {
    o: sum(bool(re.search(pattern[o], line, flags[o])) for line in lines) for o in flags
  }
  if len(set(counts.values())) < 3 or not counts['w']:
    raise Redraw
  ask = draw.pick(
    ('How many lines of {} contain {}{}?', 'Count the lines of {} with {}{}.')
  )
  manner = {'': '', 'i': ' in any case', 'w': ' as a whole word'}[option]
  params = {
    'file': file,
    'word': word,
    'option': option,
    'other': draw.other_file(files, file),
  }
  return Draft(ask.format(file, word, manner), files, params, 1, str(counts[option]))


def _teach_count_matches(p, slip):
  option = p['option']
  if option and slip('wrong_option'):
    option = ''
  file = p['other'] if slip('wrong_file') else p['file']
  printed = yield Call('count the matches', f'grep -c{option} {p["word"]} {file}')
  return Answer('that is it', first_line(printed))


def _build_find_file(draw: Draw) -> Draft:
  files = draw.files()
  file = draw.any_file(files)
  word = draw.plant(files, file, 1, 6)
  ask = draw.pick(
    ('Which file contains {}?', 'Find the file with {} in it.', 'Where is {} used?')
  )
  return Draft(ask.format(word), files, {'word': word}, 1, file)


def _teach_find_file(p, slip):
  option = '-L' if slip('wrong_option') else '-l'
  printed = yield Call('find the file', f'grep {option} {p["word"]} *')
  return Answer('that is it', first_line(printed))


_DEFINED = re.compile(r'\bdef ([a-z]\w{2,11})\(')
_CALLED = re.compile(r'(?<!def )(?<!class )\b([a-z]\w{3,})\(')


def plant_definition(draw: Draw, files: Files) -> tuple[str, str]:
  """Makes one file define a word that one or two others call; returns (file, word).

  One of the others precedes it in the shell's order, so a search for any use of the
  word does not find the right file first.
  """
  defined = {
    name: _DEFINED.findall('\n'.join(files[name])) for name in sorted(files)[1:]
  }
  file = draw.pick([name for name, words in defined.items() if words])
  word = draw.substitute(files, file, draw.pick(defined[file]), draw.word(files))
  earlier = draw.pick([name for name in files if name < file])
  for caller in dict.fromkeys((earlier, draw.other_file(files, file))):
    called = draw.pick(_CALLED.findall('\n'.join(files[caller])))
    draw.substitute(files, caller, called, word)
    if any(f'def {word}' in line for line in files[caller]):
      raise Redraw
  return file, word


def _build_find_definition(draw: Draw) -> Draft:
  files = draw.files()
  file, word = plant_definition(draw, files)
  ask = draw.pick(
    ('Which file defines {}?', 'Find the file that defines {}.', 'Where is {} defined?')
  )
  return Draft(ask.format(word), files, {'word': word}, 1, file)


def _teach_find_definition(p, slip):
  pattern = p['word'] if slip('wrong_option') else f'"def {p["word"]}"'
  printed = yield Call('find the file', f'grep -l {pattern} *')
  return Answer('that is it', first_line(printed))


def _has_plain_ends(line: str) -> bool:
  """Returns whether a line starts and ends with two different short identifiers."""
  words = line.split()
  return (
    1 < len(words)
    and len(line) <= 50
    and words[0] != words[-1]
    and all(re.fullmatch(r'[A-Za-z_]\w{0,11}', words[end]) for end in (0, -1))
  )


def _build_line_word(draw: Draw) -> Draft:
  files = draw.files()
  file = draw.any_file(files)
  lines = files[file]
  line = draw.pick(
    [i for i in range(2, len(lines)) if draw.owns(i) and _has_plain_ends(lines[i - 1])]
  )
  words = lines[line - 1].split()
  which = draw.pick(('first', 'last'))
  ask = draw.pick(
    (
      'What is the {} word on line {} of {}?',
      'Give the {} word of line {} in {}.',
    )
  )
  params = {'file': file, 'line': line, 'position': {'first': 0, 'last': -1}[which]}
  answer = words[params['position']]
  return Draft(ask.format(which, line, file), files, params, 1, answer)


def _teach_line_word(p, slip):
  line = p['line'] - 1 if slip('off_by_one') else p['line']
  printed = yield Call('print the line', f'sed -n {line}p {p["file"]}')
  position = -1 - p['position'] if slip('wrong_part') else p['position']
  return Answer('take the word', a_word(printed, position))


def _build_line_number(draw: Draw) -> Draft:
  files = draw.files()
  file = draw.any_file(files)
  word = draw.plant(files, file, 2, 8)
  found = lines_with(files, file, word)
  if len(found) < 2 or any(len(files[file][i - 1]) > 60 for i in found):
    raise Redraw
  which = draw.pick(('first', 'last'))
  ask = draw.pick(
    (
      'On which line of {1} does {2} {0} appear?',
      'Give the number of the {0} line of {1} with {2}.',
    )
  )
  params = {'file': file, 'word': word, 'which': which}
  answer = str(found[0 if which == 'first' else -1])
  return Draft(ask.format(which, file, word), files, params, 1, answer)


def _teach_line_number(p, slip):
  end = 'head' if p['which'] == 'first' else 'tail'
  if end == 'tail' and slip('wrong_end'):
    end = 'head'
  printed = yield Call(
    'number the matches', f'grep -n {p["word"]} {p["file"]} | {end} -1'
  )
  number, _, rest = first_line(printed).partition(':')
  if slip('wrong_part'):
    return Answer('take the number', a_word(rest, 0))
  return Answer('take the number', number)


def _build_longer(draw: Draw) -> Draft:
  files = draw.files()
  one, two = draw.rng.sample(list(files), 2)
  lengths = {name: len(files[name]) for name in (one, two)}
  if lengths[one] == lengths[two]:
    raise Redraw
  which = draw.pick(('more', 'fewer'))
  ask = draw.pick(
    ('Which has {} lines, {} or {}?', 'Of two files, which has {} lines: {} or {}?')
  )
  answer = (max if which == 'more' else min)(lengths, key=lengths.get)
  params = {'one': one, 'two': two, 'which': which}
  return Draft(ask.format(which, one, two), files, params, 1, answer)


def _teach_longer(p, slip):
  row = 'sed -n 2p' if p['which'] == 'more' else 'head -1'
  if p['which'] == 'more' and slip('wrong_end'):
    row = 'head -1'
  command = f'wc -l {p["one"]} {p["two"]} | sort -n | {row}'
  printed = yield Call('sort them by lines', command)
  return Answer('take the name', a_word(printed, 0 if slip('wrong_part') else 1))


def _build_extreme(draw: Draw) -> Draft:
  files = draw.files()
  which, file = pick_extreme(draw, files)
  ask = draw.pick(('Which file is the {}?', 'Name the {} file.'))
  return Draft(ask.format(which), files, {'which': which}, 1, file)


def pick_extreme(draw: Draw, files: Files) -> tuple[str, str]:
  """Returns 'largest' or 'smallest', and that file; all sizes have to differ."""
  sizes = {name: size_bytes(lines) for name, lines in files.items()}
  if len(set(sizes.values())) < len(sizes):
    raise Redraw
  which = draw.pick(('largest', 'smallest'))
  return which, (max if which == 'largest' else min)(sizes, key=sizes.get)


def extreme_command(which: str, slip) -> str:
  """Returns the command that prints the largest or smallest file's name."""
  end = 'head' if which == 'largest' else 'tail'
  if end == 'tail' and slip('wrong_end'):
    end = 'head'
  return f'ls {"" if slip("unsorted") else "-S "}| {end} -1'


def _teach_extreme(p, slip):
  printed = yield Call('sort by size', extreme_command(p['which'], slip))
  return Answer('that is it', first_line(printed))


def _build_value(draw: Draw) -> Draft:
  files = draw.files()
  file, name, value = draw.add_constant(files)
  ask = draw.pick(
    ('What is {} set to in {}?', 'Give the value of {} in {}.', 'Look up {} in {}.')
  )
  params = {'file': file, 'name': name, 'other': draw.other_file(files, file)}
  return Draft(ask.format(name, file), files, params, 1, value)


def _teach_value(p, slip):
  file = p['other'] if slip('wrong_file') else p['file']
  printed = yield Call('find the line', f'grep "{p["name"]} =" {file}')
  return Answer('take the value', a_word(printed, 0 if slip('wrong_part') else -1))


FAMILIES = {
  'count_lines': Family(
    _build_count_lines, _teach_count_lines, ('wrong_option', 'wrong_file')
  ),
  'count_matches': Family(
    _build_count_matches, _teach_count_matches, ('wrong_option', 'wrong_file')
  ),
  'find_file': Family(_build_find_file, _teach_find_file, ('wrong_option',)),
  'find_definition': Family(
    _build_find_definition, _teach_find_definition, ('wrong_option',)
  ),
  'line_word': Family(_build_line_word, _teach_line_word, ('off_by_one', 'wrong_part')),
  'line_number': Family(
    _build_line_number, _teach_line_number, ('wrong_end', 'wrong_part')
  ),
  'longer': Family(_build_longer, _teach_longer, ('wrong_end', 'wrong_part')),
  'extreme': Family(_build_extreme, _teach_extreme, ('wrong_end', 'unsorted')),
  'value': Family(_build_value, _teach_value, ('wrong_file', 'wrong_part')),
}
