"""The parts that a deck may have, and how they may refer to each other.

Slides and charts follow the lists in `allowed`. Everything that slides inherit from is
that of python-pptx's default template: layouts, master, theme, and all of
presentation.xml but the lists of slides and their size. Notes are on no slide, so they
may say anything.
"""

import io
import posixpath
import zipfile

import allowed

_DOCUMENT = 'http://schemas.openxmlformats.org/officeDocument/2006/relationships/'
_PACKAGE = 'http://schemas.openxmlformats.org/package/2006/'
_TYPES = _PACKAGE + 'content-types'
P = '{http://schemas.openxmlformats.org/presentationml/2006/main}'
_OFFICE = 'application/vnd.openxmlformats-'
_SLIDES = _OFFICE + 'officedocument.presentationml.'
# Kind of part → (content type, kind of relationship → kind of its target).
_KINDS = {
  '': (
    '',
    {
      _DOCUMENT + 'officeDocument': 'presentation',
      _DOCUMENT + 'extended-properties': 'properties',
      _PACKAGE + 'relationships/metadata/core-properties': 'core',
      _PACKAGE + 'relationships/metadata/thumbnail': 'image',
    },
  ),
  'presentation': (
    _SLIDES + 'presentation.main+xml',
    {
      _DOCUMENT + one: one
      for one in (
        *('slideMaster', 'slide', 'notesMaster', 'presProps', 'viewProps'),
        *('tableStyles', 'theme', 'printerSettings'),
      )
    },
  ),
  'slide': (
    _SLIDES + 'slide+xml',
    {_DOCUMENT + one: one for one in ('slideLayout', 'chart', 'image', 'notesSlide')},
  ),
  'chart': (
    _OFFICE + 'officedocument.drawingml.chart+xml',
    {_DOCUMENT + 'package': 'workbook'},
  ),
  'slideMaster': (
    _SLIDES + 'slideMaster+xml',
    {_DOCUMENT + one: one for one in ('slideLayout', 'theme')},
  ),
  'slideLayout': (
    _SLIDES + 'slideLayout+xml',
    {_DOCUMENT + 'slideMaster': 'slideMaster'},
  ),
  'notesSlide': (
    _SLIDES + 'notesSlide+xml',
    {_DOCUMENT + one: one for one in ('notesMaster', 'slide')},
  ),
  'notesMaster': (_SLIDES + 'notesMaster+xml', {_DOCUMENT + 'theme': 'notesTheme'}),
  'theme': (_OFFICE + 'officedocument.theme+xml', {}),
  'notesTheme': (_OFFICE + 'officedocument.theme+xml', {}),
  'presProps': (_SLIDES + 'presProps+xml', {}),
  'viewProps': (_SLIDES + 'viewProps+xml', {}),
  'tableStyles': (_SLIDES + 'tableStyles+xml', {}),
  'printerSettings': (_SLIDES + 'printerSettings', {}),
  'properties': (_OFFICE + 'officedocument.extended-properties+xml', {}),
  'core': (_OFFICE + 'package.core-properties+xml', {}),
  'workbook': (_OFFICE + 'officedocument.spreadsheetml.sheet', {}),
  'image': (('image/png', 'image/jpeg', 'image/gif', 'image/bmp', 'image/tiff'), {}),
}
_SHIPPED = (
  *('slideMaster', 'slideLayout', 'theme', 'presProps', 'viewProps', 'tableStyles'),
)
_LISTS = ('sldMasterIdLst', 'sldIdLst', 'notesMasterIdLst')


def check(data):
  """'' or the first thing in the bytes of a deck that is not allowed."""
  with zipfile.ZipFile(io.BytesIO(data)) as archive:
    members = {one: archive.read(one) for one in archive.namelist()}
  kinds, reason = _walked(members)
  if reason:
    return reason
  template = _template()
  for one, kind in kinds.items():
    if kind in ('slide', 'chart'):
      listed, top = (
        (allowed.SLIDE, 'p:sld') if kind == 'slide' else (allowed.CHART, 'c:chartSpace')
      )
      root = _parsed(members[one])
      reason = allowed.wrong(root, listed) if allowed.name(root.tag) == top else top
    elif kind == 'presentation':
      reason = _presentation(_parsed(members[one]), template[kind])
    elif kind in _SHIPPED and _plain(members[one], kind) not in template[kind]:
      reason = "this part is not that of python-pptx's default template"
    if reason:
      return f'{one}: {reason}'
  return ''


def _walked(members):
  """(part → its kind, what is wrong with their relationships)"""
  types, reason = _content_types(members)
  kinds, todo, read = {}, [('', '')], {'[Content_Types].xml'}
  while todo and not reason:
    part, kind = todo.pop()
    folder, base = posixpath.split(part)
    rels = posixpath.join(folder, '_rels', f'{base}.rels')
    read.add(rels)
    if rels not in members:
      continue
    root, ids = _parsed(members[rels]), set()
    for one in root.iter(f'{{{_PACKAGE}relationships}}Relationship'):
      target, relation = one.get('Target', ''), one.get('Type', '')
      full = posixpath.normpath(posixpath.join('/' + folder, target))[1:]
      own = _KINDS[kind][1].get(relation)
      if own is None or full not in members or one.get('Id') in ids:
        return kinds, f'{rels}: {relation.rpartition("/")[2]} is not allowed'
      ids.add(one.get('Id'))
      if full in kinds:
        if kinds[full] != own:
          return kinds, f'{rels}: {full} is a {kinds[full]} and a {own}'
        continue
      expected = _KINDS[own][0]
      if types(full) not in (expected if isinstance(expected, tuple) else (expected,)):
        return kinds, f'{full}: the content type {types(full)} is not allowed'
      kinds[full] = own
      todo.append((full, own))
  if not reason and (others := sorted(set(members) - read - set(kinds))):
    reason = f'{others[0]}: nothing refers to this part'
  if not reason and list(kinds.values()).count('presentation') != 1:
    reason = 'not one presentation'
  return kinds, reason


def _content_types(members):
  """(function of a part's name to its content type, what is wrong)"""
  if '[Content_Types].xml' not in members:
    return None, 'there is no [Content_Types].xml'
  found, reason = {}, ''
  for one in _parsed(members['[Content_Types].xml']):
    key = one.get('PartName') or '.' + one.get('Extension', '')
    if key.lower() in found:
      reason = f'[Content_Types].xml: {key} has two types'
    found[key.lower()] = one.get('ContentType')

  def of(part):
    extension = posixpath.splitext(part)[1]
    return found.get('/' + part.lower(), found.get(extension.lower()))

  return of, reason


def _parsed(data):
  from lxml import etree

  options = dict(resolve_entities=False, no_network=True, remove_blank_text=True)
  return etree.fromstring(data, etree.XMLParser(**options))


def _canonical(element):
  from lxml import etree

  return etree.tostring(element, method='c14n', with_comments=True).strip()


def _plain(data, kind):
  """A part in canonical form; a master without its list of layouts."""
  root = _parsed(data)
  if kind == 'slideMaster':
    for one in root.findall(P + 'sldLayoutIdLst'):
      root.remove(one)
  return _canonical(root)


def _template():
  """Kind → parts of python-pptx's default template."""
  import pptx

  kinds = {_KINDS[kind][0]: kind for kind in (*_SHIPPED, 'presentation')}
  found = {}
  for part in pptx.Presentation().part.package.iter_parts():
    if kind := kinds.get(part.content_type):
      if kind == 'presentation':
        found[kind] = _parsed(part.blob)
      else:
        found.setdefault(kind, set()).add(_plain(part.blob, kind))
  return found


def _presentation(root, template):
  """'' or the first element of presentation.xml that may not be there."""
  if root.tag != template.tag or dict(root.attrib) != dict(template.attrib):
    return 'the attributes of p:presentation are not those of the default template'
  known = {_canonical(one) for one in template}
  for one in root:
    own = allowed.name(one.tag) if isinstance(one.tag, str) else 'a comment'
    listed = own[2:] in _LISTS and all(not len(child) for child in one)
    size = own == 'p:sldSz' and set(one.attrib) <= {'cx', 'cy', 'type'} and not len(one)
    if not listed and not size and _canonical(one) not in known:
      return f'{own} is not that of the default template'
    if root.findall(one.tag)[1:]:
      return f'more than one {own} is not allowed'
  return ''
