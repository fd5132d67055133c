"""Families that change the workspace; its complete end state is judged."""

from __future__ import annotations

from m2jax.tasks.terminal.draw import (
  Answer,
  Call,
  Draft,
  Draw,
  Family,
  Files,
  Redraw,
  a_word,
  files_with,
  first_line,
  lines_with,
)

DONE = Answer('all done', 'done')


def suffix_of(file: str) -> str:
  return file[file.rindex('.') :]


def _build_rename(draw: Draw) -> Draft:
  files = draw.files()
  file = draw.any_file(files)
  new = draw.new_name(files, suffix_of(file))
  after = dict(files)
  after[new] = after.pop(file)
  ask = draw.pick(('Rename {} to {}.', 'Give {} the new name {}.'))
  params = {'file': file, 'new': new, 'other': draw.other_file(files, file)}
  return Draft(ask.format(file, new), files, params, 1, after=after)


def _teach_rename(p, slip):
  program = 'cp' if slip('wrong_option') else 'mv'
  file = p['other'] if slip('wrong_file') else p['file']
  yield Call('rename it', f'{program} {file} {p["new"]}')
  return DONE


def _build_append(draw: Draw) -> Draft:
  files = draw.files()
  file, word = draw.any_file(files), draw.word(files)
  after = files | {file: [*files[file], word]}
  ask = draw.pick(('Append the line {} to {}.', 'Add {} as the last line of {}.'))
  params = {'file': file, 'word': word, 'other': draw.other_file(files, file)}
  return Draft(ask.format(word, file), files, params, 1, after=after)


def _teach_append(p, slip):
  arrow = '>' if slip('clobber') else '>>'
  file = p['other'] if slip('wrong_file') else p['file']
  yield Call('add the line', f'echo {p["word"]} {arrow} {file}')
  return DONE


def replaced(files: Files, file: str, old: str, new: str) -> Files:
  """Returns the files, with every `old` in `file` replaced by `new`."""
  return files | {file: [line.replace(old, new) for line in files[file]]}


def _build_replace(draw: Draw) -> Draft:
  files = draw.files()
  file = draw.any_file(files)
  old = draw.plant(files, file, 1, 8, twice=True)
  new = draw.word(files)
  ask = draw.pick(('Replace every {} with {} in {}.', 'Change all {} to {} in {}.'))
  params = {'file': file, 'old': old, 'new': new}
  after = replaced(files, file, old, new)
  return Draft(ask.format(old, new, file), files, params, 1, after=after)


def sed(script: str, file: str, slip) -> str:
  """Returns the command that edits a file in place, unless the teacher forgets to."""
  return f'sed {"" if slip("not_in_place") else "-i "}{script} {file}'


def replace_script(p, slip) -> str:
  """Returns sed's script for `old` to `new`, unless the teacher forgets the g."""
  return f's/{p["old"]}/{p["new"]}/{"" if slip("first_only") else "g"}'


def _teach_replace(p, slip):
  yield Call('replace it', sed(replace_script(p, slip), p['file'], slip))
  return DONE


def _build_delete_line(draw: Draw) -> Draft:
  files = draw.files()
  file = draw.any_file(files)
  lines = files[file]
  line = draw.number(2, len(lines) - 1)
  if lines[line - 1] in (lines[line - 2], lines[line]):
    raise Redraw  # deleting the adjacent line would give the same file
  after = files | {file: lines[: line - 1] + lines[line:]}
  ask = draw.pick(('Delete line {} of {}.', 'Remove line {} from {}.'))
  params = {'file': file, 'line': line}
  return Draft(ask.format(line, file), files, params, 1, after=after)


def _teach_delete_line(p, slip):
  line = p['line'] - 1 if slip('off_by_one') else p['line']
  yield Call('delete the line', sed(f'{line}d', p['file'], slip))
  return DONE


def _build_delete_matching(draw: Draw) -> Draft:
  count = draw.rng.randint(2, draw.config.max_matches)
  files = draw.files(least=count + 1)
  chosen = draw.rng.sample(list(files), count)
  word = draw.plant(files, chosen[0], 1, 6)
  for name in chosen[1:]:
    there = draw.plant(files, name, 1, 6)
    draw.substitute(files, name, there, word)
  if files_with(files, word) != sorted(chosen):
    raise Redraw
  after = {name: lines for name, lines in files.items() if name not in chosen}
  ask = draw.pick(
    ('Delete every file that contains {}.', 'Remove all files with {} in them.')
  )
  return Draft(ask.format(word), files, {'word': word}, 2, after=after)


def _teach_delete_matching(p, slip):
  printed = yield Call('find the files', f'grep -l {p["word"]} *')
  names = printed.split()
  if slip('first_only'):
    names = names[:1]
  yield Call('delete what was found', f'rm {" ".join(names)}')
  return DONE


def _build_save_count(draw: Draw) -> Draft:
  files = draw.files()
  file = draw.any_file(files)
  if draw.chance(0.5):
    word = draw.plant(files, file, 2, 12)
    count = len(lines_with(files, file, word))
    ask = f'Write how many lines of {file} contain {word} to {{}}.'
  else:
    word, count = None, len(files[file])
    ask = f'Write the number of lines of {file} to {{}}.'
  new = draw.new_name(files, '.txt')
  params = {'file': file, 'word': word, 'new': new}
  after = files | {new: [str(count)]}
  return Draft(ask.format(new), files, params, 1, after=after, loose=(new,))


def _teach_save_count(p, slip):
  if p['word'] and not slip('wrong_option'):
    command = f'grep -c {p["word"]} {p["file"]}'
  else:
    command = f'wc -l < {p["file"]}'
  if slip('skipped_step'):
    printed = yield Call('count and save', command)
    return Answer('that is it', first_line(printed))
  yield Call('count and save', f'{command} > {p["new"]}')
  return DONE


def _build_set_value(draw: Draw) -> Draft:
  files = draw.files()
  file, name, old = draw.add_constant(files)
  new = str(draw.number(11, 999))
  if new == old:
    raise Redraw
  after = replaced(files, file, f'{name} = {old}', f'{name} = {new}')
  ask = draw.pick(('Set {} to {} in {}.', 'Change the value of {} to {} in {}.'))
  params = {'file': file, 'name': name, 'new': new}
  return Draft(ask.format(name, new, file), files, params, 2, after=after)


def _teach_set_value(p, slip):
  printed = yield Call('look at the line', f'grep "{p["name"]} =" {p["file"]}')
  old, new = a_word(printed, -1), p['new']
  if slip('swapped'):
    old, new = new, old
  yield Call('change the value', sed(f's/{old}/{new}/', p['file'], slip))
  return DONE


def _build_into_folder(draw: Draw) -> Draft:
  files = draw.files()
  file, folder = draw.any_file(files), draw.word(files)
  verb = draw.pick(('Move', 'Copy'))
  after = files | {f'{folder}/{file}': files[file]}
  if verb == 'Move':
    del after[file]
  ask = draw.pick(('{} {} into a new folder {}.', '{} {} to the new folder {}.'))
  params = {
    'file': file,
    'folder': folder,
    'program': {'Move': 'mv', 'Copy': 'cp'}[verb],
  }
  return Draft(ask.format(verb, file, folder), files, params, 2, after=after)


def _teach_into_folder(p, slip):
  if not slip('skipped_step'):
    yield Call('make the folder', f'mkdir {p["folder"]}')
  program = p['program']
  if slip('wrong_option'):
    program = {'mv': 'cp', 'cp': 'mv'}[program]
  yield Call('put it there', f'{program} {p["file"]} {p["folder"]}')
  return DONE


FAMILIES = {
  'rename': Family(_build_rename, _teach_rename, ('wrong_option', 'wrong_file')),
  'append': Family(_build_append, _teach_append, ('clobber', 'wrong_file')),
  'replace': Family(_build_replace, _teach_replace, ('first_only', 'not_in_place')),
  'delete_line': Family(
    _build_delete_line, _teach_delete_line, ('off_by_one', 'not_in_place')
  ),
  'delete_matching': Family(
    _build_delete_matching, _teach_delete_matching, ('first_only',)
  ),
  'save_count': Family(
    _build_save_count, _teach_save_count, ('wrong_option', 'skipped_step')
  ),
  'set_value': Family(_build_set_value, _teach_set_value, ('swapped', 'not_in_place')),
  'into_folder': Family(
    _build_into_folder, _teach_into_folder, ('skipped_step', 'wrong_option')
  ),
}
