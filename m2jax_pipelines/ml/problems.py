"""The machine-learning problems: data of installed packages, and a ladder of solutions.

Data files are read from wheels, not through their packages. Rows are shuffled, have
random ids and no names; numeric columns are rescaled and get 1 % of noise, so that no
row is equal to that of a public copy. A rung of a ladder is an expression for the
values of test.csv, in the names of `KIT` and `ladder.py`.

Axes: N rows, D columns.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from m2jax_pipelines import installed

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Data:
  """The data of a task.

  Attributes:
    train: rows of train.csv, with `target` where there are labels; empty: no such file.
    test: rows of test.csv, without `target`.
    truth: value of each test row.
    public: some test rows as a public copy has them, for the leak search: numbers in
      their order, or a text.
  """

  train: Sequence[Row]
  test: Sequence[Row]
  truth: Sequence[Any]
  public: Sequence[Sequence[float] | str]


@dataclasses.dataclass(frozen=True)
class Problem:
  """A problem.

  Attributes:
    family: kind of learning.
    metric: one of `grade.METRICS`.
    package: the distribution that has the data.
    files: its data files, relative to where distributions are installed; a name with
      '*' is a pattern.
    about: what the statement says about the data.
    draw: makes the data of a task from random numbers and the files.
    ladder: name → expression for the predictions; the first is the best constant.
  """

  family: str
  metric: str
  package: str
  files: tuple[str, ...]
  about: str
  draw: Callable[[np.random.Generator, list[Path]], Data]
  ladder: Mapping[str, str]

  def paths(self) -> list[Path]:
    """The data files. Raises installed.SourceMissing."""
    found = installed.distribution(self.package)
    paths = [
      path
      for name in self.files
      for path in sorted(Path(found.locate_file('')).glob(name))
    ]
    if len(paths) < len(self.files):
      raise installed.SourceMissing(f'{self.package} has no {self.files}')
    return paths


def _table(path: Path, delimiter: str = ',') -> np.ndarray:
  """[N, D] float64; the first line is omitted."""
  return np.genfromtxt(path, delimiter=delimiter, skip_header=1)


def disguised(rng: np.random.Generator, values: np.ndarray) -> np.ndarray:
  """[N, D] values: each column rescaled, and 1 % of its deviation added as noise."""
  deviation = values.std(axis=0)
  scale = np.exp(rng.uniform(-1, 1, values.shape[1]))
  noise = 0.01 * deviation * rng.standard_normal(values.shape)
  shift = deviation * rng.standard_normal(values.shape[1])
  return np.round((values + shift + noise) * scale, 4)


def ids(rng: np.random.Generator, count: int) -> list[str]:
  """Distinct random ids."""
  return [f'r{number:06x}' for number in rng.choice(1 << 24, count, replace=False)]


def _rows(values, targets=None, own=None) -> list[Row]:
  rows = []
  for number, line in enumerate(values):
    row = {} if own is None else {'id': own[number]}
    row |= {f'x{j}': value for j, value in enumerate(line)}
    if targets is not None:
      row['target'] = targets[number]
    rows.append(row)
  return rows


def _split(rng, values, targets, public, test: int, train: int | None = None) -> Data:
  """Shuffled and divided; `values`, `targets` and `public` have a row per example."""
  order = rng.permutation(len(targets))
  held, kept = order[:test], order[test : None if train is None else test + train]
  targets = np.asarray(targets)
  return Data(
    _rows(values[kept].tolist(), targets[kept].tolist()),
    _rows(values[held].tolist(), own=ids(rng, test)),
    targets[held].tolist(),
    [public[i] for i in held],
  )


def _column(place: int, test: int, train: int | None = None, *, delimiter=',', of=None):
  """Draws from a table whose label is a column; `of` changes the labels."""

  def draw(rng, paths):
    table = _table(paths[0], delimiter)
    table = table[rng.permutation(len(table))[: test + (train or len(table))]]
    targets = table[:, place] if of is None else of(table[:, place])
    values = disguised(rng, np.delete(table, place, axis=1))
    return _split(rng, values, targets, table.tolist(), test, train)

  return draw


def _weather(rng, paths):
  lines = list(csv.reader(io.StringIO(paths[0].read_text())))[1:]
  table = np.array([[float(v) for v in line[1:5]] for line in lines])
  labels = [line[5] for line in lines]
  return _split(rng, disguised(rng, table), labels, table.tolist(), 600)


def _progression(rng, paths):
  table = np.loadtxt(io.BytesIO(gzip.decompress(paths[0].read_bytes())))
  targets = np.loadtxt(io.BytesIO(gzip.decompress(paths[1].read_bytes())))
  return _split(rng, disguised(rng, table), targets, table.tolist(), 180)


def _digits(rng, paths):
  text = gzip.decompress(paths[0].read_bytes())
  table = np.loadtxt(io.BytesIO(text), delimiter=',').astype(int)
  pixels = table[:, :-1]
  noise = rng.integers(-1, 2, pixels.shape) * (pixels > 0)
  pixels = np.clip(pixels + noise, 0, 16)
  return _split(rng, pixels, table[:, -1], table.tolist(), 900, 400)


def _carbon(rng, paths, horizon=104):
  table = _table(paths[0])
  weeks, level = np.arange(len(table)), table[:, 1]
  given = np.isfinite(level)
  weeks, table, level = weeks[given], table[given], level[given]
  level = np.round(level * rng.uniform(2, 3) + rng.uniform(50, 99), 2)
  rows = [
    {'week': int(w), 'target': v}
    for w, v in zip(weeks[:-horizon], level[:-horizon].tolist(), strict=True)
  ]
  order = rng.permutation(horizon)
  own, late = ids(rng, horizon), slice(-horizon, None)
  test = [
    {'id': i, 'week': int(w)} for i, w in zip(own, weeks[late][order], strict=True)
  ]
  lines = table[late].reshape(-1, 16).tolist()  # dates and levels of eight weeks
  lines += table[late, 1].reshape(-1, 8).tolist()
  return Data(rows, test, level[late][order].tolist(), lines)


def _cultivars(rng, paths):
  table = _table(paths[0])
  values = disguised(rng, table[:, :-1])
  found = _split(rng, values, table[:, -1].astype(int), table.tolist(), len(table))
  return dataclasses.replace(found, train=())


def _tumours(rng, paths):
  table = _table(paths[0])
  values, benign = disguised(rng, table[:, :-1]), table[:, -1] == 1
  order = rng.permutation(np.flatnonzero(benign))
  known = set(order[:200].tolist())
  rest = [i for i in range(len(table)) if i not in known]
  found = _split(
    rng, values[rest], (~benign[rest]).astype(int), table[rest].tolist(), len(rest)
  )
  return dataclasses.replace(found, train=_rows(values[order[:200]].tolist()))


LANGUAGES = tuple('da nb nn sv is cs sk pl sl hr es gl ca pt it'.split())


def _languages(rng, paths, train=100, test=60):
  texts: dict[str, set[str]] = {}
  for path in paths:
    code = path.parent.parent.name
    if code in LANGUAGES:
      found = re.findall(r'(?m)^msgstr "([^"\\%{<]{20,60})"$', path.read_text('utf-8'))
      for text in found:
        texts.setdefault(text, set()).add(code)
  rows: dict[str, list] = {code: [] for code in LANGUAGES}
  for text, codes in sorted(texts.items()):
    if len(codes) == 1:
      rows[codes.pop()].append(text)
  chosen = {code: rng.permutation(rows[code])[: train + test] for code in LANGUAGES}
  known = [(t, c) for c in LANGUAGES for t in chosen[c][test:].tolist()]
  held = [(t, c) for c in LANGUAGES for t in chosen[c][:test].tolist()]
  rng.shuffle(known), rng.shuffle(held)
  own = ids(rng, len(held))
  return Data(
    [{'text': text, 'target': code} for text, code in known],
    [{'id': i, 'text': text} for i, (text, _) in zip(own, held, strict=True)],
    [code for _, code in held],
    sorted((text for text, _ in held), key=len)[-12:],
  )


def _photos(rng, paths, patches=100, test=40, side=16, deviation=25.0):
  import PIL.Image

  train_rows, test_rows, truth, public = [], [], [], []
  for number in range(patches):
    image = np.asarray(PIL.Image.open(paths[number % len(paths)]).convert('L'))
    top, left = (int(rng.integers(0, n - side)) for n in image.shape)
    clean = image[top : top + side, left : left + side]
    if number < test:
      public += clean[clean.std(axis=1) > 8][:1].tolist()  # not all black
    clean = np.rot90(clean, rng.integers(4)).astype(float)
    noisy = np.round(clean + deviation * rng.standard_normal(clean.shape), 1)
    own = ids(rng, clean.size)
    for (i, j), value in np.ndenumerate(clean):
      row = {'patch': number, 'row': i, 'column': j, 'noisy': float(noisy[i, j])}
      if number < test:
        test_rows.append({'id': f'p{number}{own[i * side + j]}', **row})
        truth.append(float(value))
      else:
        train_rows.append(row | {'target': float(value)})
  return Data(train_rows, test_rows, truth, public)


_STATSMODELS, _SKLEARN = 'statsmodels/datasets', 'sklearn/datasets/data'
_COLUMNS = 'The columns are numeric and have no names.'
_FOREST = 'min_samples_leaf=3, random_state=0, n_jobs=1'
_BOOST = 'learning_rate=0.05, max_iter=150, random_state=0'

PROBLEMS: Mapping[str, Problem] = {
  'affairs': Problem(
    'binary classification',
    'auc',
    'statsmodels',
    (f'{_STATSMODELS}/fair/fair.csv',),
    f'Answers of women to a survey about their marriage. {_COLUMNS} `target` is 1 if '
    'she has had an affair, otherwise 0; submit a score that is higher the likelier 1 '
    'is.',
    _column(8, 2000, of=lambda hours: (hours > 0).astype(int)),
    {
      'constant': 'np.zeros(len(T))',
      'column': 'T[:, 0] * np.corrcoef(X[:, 0], y)[0, 1]',
      'tree': 'proba(tree.DecisionTreeClassifier(max_depth=2))',
      'bayes': 'proba(naive_bayes.GaussianNB())',
      'neighbours': 'proba(scaled(neighbors.KNeighborsClassifier(50)))',
      'logistic': 'proba(scaled(linear_model.LogisticRegression()))',
      'boosting': f'proba(ensemble.HistGradientBoostingClassifier({_BOOST}))',
    },
  ),
  'weather': Problem(
    'multiclass classification',
    'macro_f1',
    'vega_datasets',
    ('vega_datasets/_data/seattle-weather.csv',),
    f'Measurements of days in one city. {_COLUMNS} `target` is the kind of weather: '
    'drizzle, fog, rain, snow or sun.',
    _weather,
    {
      'constant': "['sun'] * len(T)",
      'bayes': 'predict(naive_bayes.GaussianNB())',
      'logistic': 'predict(scaled(linear_model.LogisticRegression()))',
      'neighbours': 'predict(scaled(neighbors.KNeighborsClassifier(5)))',
      'tree': 'predict(tree.DecisionTreeClassifier(max_depth=4, random_state=0))',
      'forest': f'predict(ensemble.RandomForestClassifier(200, {_FOREST}))',
      'balanced': 'predict(ensemble.RandomForestClassifier(200, '
      f"class_weight='balanced', {_FOREST}))",
    },
  ),
  'progression': Problem(
    'regression',
    'rmse',
    'scikit-learn',
    tuple(f'{_SKLEARN}/diabetes_{n}.csv.gz' for n in ('data_raw', 'target')),
    f'Measurements of patients. {_COLUMNS} `target` is the progression of a disease '
    'after one year.',
    _progression,
    {
      'constant': 'np.full(len(T), y.mean())',
      'column': 'linear_model.LinearRegression().fit(X[:, 2:3], y).predict(T[:, 2:3])',
      'tree': 'predict(tree.DecisionTreeRegressor(max_depth=3, random_state=0))',
      'neighbours': 'predict(scaled(neighbors.KNeighborsRegressor(10)))',
      'forest': f'predict(ensemble.RandomForestRegressor(200, {_FOREST}))',
      'ridge': 'predict(scaled(linear_model.RidgeCV(np.logspace(-2, 3, 20))))',
      'both': 'predict(scaled(linear_model.RidgeCV(np.logspace(-2, 3, 20)))) / 2 + '
      f'predict(ensemble.RandomForestRegressor(200, {_FOREST})) / 2',
    },
  ),
  'visits': Problem(
    'counts',
    'rmsle',
    'statsmodels',
    (f'{_STATSMODELS}/randhie/randhie.csv',),
    f'People in a health insurance experiment. {_COLUMNS} `target` is the number of '
    'their visits to a doctor in a year.',
    _column(0, 2500, 2500),
    {
      'constant': 'np.full(len(T), np.expm1(np.log1p(y).mean()))',
      'mean': 'np.full(len(T), y.mean())',
      'column': 'np.expm1(linear_model.LinearRegression().fit(X[:, :1], np.log1p(y))'
      '.predict(T[:, :1]))',
      'linear': 'predict(linear_model.LinearRegression())',
      'log linear': 'np.expm1(predict(linear_model.LinearRegression(), np.log1p(y)))',
      'forest': 'np.expm1(predict(ensemble.RandomForestRegressor(200, '
      'min_samples_leaf=10, random_state=0), np.log1p(y)))',
      'boosting': 'np.expm1(predict(ensemble.HistGradientBoostingRegressor('
      f'min_samples_leaf=40, {_BOOST}), np.log1p(y)))',
    },
  ),
  'carbon': Problem(
    'forecast',
    'mae',
    'statsmodels',
    (f'{_STATSMODELS}/co2/co2.csv',),
    'Weekly measurements of a gas in the air, in a unit of our own. test.csv has the '
    'last weeks of the series, train.csv those before them; some weeks are missing.',
    _carbon,
    {
      'constant': 'np.full(len(T), y[-1])',
      'mean': 'np.full(len(T), y.mean())',
      'line': 'predict(linear_model.LinearRegression())',
      'year before': 'np.interp(T[:, 0] - 52.18 * np.ceil((T[:, 0] - X[-1, 0]) / 52.18)'
      ', X[:, 0], y)',
      'harmonics': 'seasonal(1, 2)',
      'curved': 'seasonal(2, 3)',
      'recent': 'seasonal(1, 3, 520)',
    },
  ),
  'digits': Problem(
    'image classification',
    'accuracy',
    'scikit-learn',
    (f'{_SKLEARN}/digits.csv.gz',),
    'Images of handwritten digits, 8 by 8 pixels from 0 to 16, row by row in x0 to '
    'x63. `target` is the digit.',
    _digits,
    {
      'constant': '[0] * len(T)',
      'bayes': 'predict(naive_bayes.GaussianNB())',
      'tree': 'predict(tree.DecisionTreeClassifier(random_state=0))',
      'centroids': 'predict(neighbors.NearestCentroid())',
      'logistic': 'predict(scaled(linear_model.LogisticRegression(max_iter=500)))',
      'neighbours': 'predict(neighbors.KNeighborsClassifier(3))',
      'kernel': 'predict(svm.SVC(C=10, gamma=0.001))',
    },
  ),
  'languages': Problem(
    'text classification',
    'accuracy',
    'django',
    ('django/conf/locale/*/LC_MESSAGES/*.po', 'django/contrib/*/locale/*/*/*.po'),
    'Messages of a program in 15 related languages. `target` is the code of the '
    f'language: {", ".join(LANGUAGES)}.',
    _languages,
    {
      'constant': "['da'] * len(T)",
      'letters': 'text(naive_bayes.MultinomialNB(), analyzer="char")',
      'words': 'text(naive_bayes.MultinomialNB())',
      'pairs': 'text(naive_bayes.MultinomialNB(), analyzer="char", ngram_range=(1, 2))',
      'triples': 'text(naive_bayes.MultinomialNB(alpha=0.1), analyzer="char_wb", '
      'ngram_range=(1, 3))',
      'longer': 'text(naive_bayes.MultinomialNB(alpha=0.03), analyzer="char_wb", '
      'ngram_range=(1, 5))',
      'margin': 'text(svm.LinearSVC(), analyzer="char_wb", ngram_range=(1, 4))',
    },
  ),
  'party': Problem(
    'ranking',
    'spearman',
    'statsmodels',
    (f'{_STATSMODELS}/anes96/anes96.csv',),
    f'Answers of voters before an election. {_COLUMNS} `target` is a place on a scale '
    'from one party (0) to the other (6); submit numbers that put the voters in this '
    'order.',
    _column(5, 400, delimiter='\t'),
    {
      'constant': 'np.zeros(len(T))',
      'column': 'T[:, 2] * np.corrcoef(X[:, 2], y)[0, 1]',
      'neighbours': 'predict(scaled(neighbors.KNeighborsRegressor(20)))',
      'tree': 'predict(tree.DecisionTreeRegressor(max_depth=2, random_state=0))',
      'ridge': 'predict(scaled(linear_model.Ridge()))',
      'forest': f'predict(ensemble.RandomForestRegressor(300, {_FOREST}))',
      'boosting': 'predict(ensemble.GradientBoostingRegressor(n_estimators=60, '
      'max_depth=3, learning_rate=0.06, subsample=0.7, random_state=0))',
    },
  ),
  'cultivars': Problem(
    'clustering',
    'ari',
    'scikit-learn',
    (f'{_SKLEARN}/wine_data.csv',),
    f'Analyses of wines. {_COLUMNS} There are no labels: submit for each wine the name '
    'of a group, any three names, so that the groups are the three cultivars.',
    _cultivars,
    {
      'constant': '[0] * len(T)',
      'means': 'groups(cluster.KMeans(3, n_init=10, random_state=0), T)',
      'single': "groups(cluster.AgglomerativeClustering(3, linkage='average'), Z)",
      'complete': "groups(cluster.AgglomerativeClustering(3, linkage='complete'), Z)",
      'ward': 'groups(cluster.AgglomerativeClustering(3), Z)',
      'two axes': 'groups(cluster.KMeans(3, n_init=10, random_state=0), '
      'decomposition.PCA(2).fit_transform(Z))',
      'mixture': "groups(mixture.GaussianMixture(3, covariance_type='diag', n_init=20, "
      'random_state=0), Z)',
    },
  ),
  'tumours': Problem(
    'anomaly detection',
    'auc',
    'scikit-learn',
    (f'{_SKLEARN}/breast_cancer.csv',),
    f'Measurements of cells. {_COLUMNS} train.csv has benign samples only, test.csv '
    'benign and malignant ones; submit a score that is higher the likelier a sample is '
    'malignant.',
    _tumours,
    {
      'constant': 'np.zeros(len(T))',
      'deviation': 'abs(Z[:, 9])',
      'neighbours': 'neighbors.NearestNeighbors(n_neighbors=5).fit(U)'
      '.kneighbors(Z)[0].mean(axis=1)',
      'distance': '(Z**2).sum(axis=1)',
      'forest': '-ensemble.IsolationForest(random_state=0).fit(X).score_samples(T)',
      'kernel': '-svm.OneClassSVM(gamma=0.02, nu=0.2).fit(U).score_samples(Z)',
      'mean': 'Z.mean(axis=1)',
    },
  ),
  'photos': Problem(
    'denoising',
    'rmse',
    'scikit-image',
    tuple(f'skimage/data/{n}.png' for n in ('camera', 'coins', 'moon', 'chelsea')),
    'Patches of photographs, 16 by 16 pixels, with noise; a row of the files is a '
    'pixel. `target` is the pixel without noise, from 0 to 255.',
    _photos,
    {
      'constant': 'np.full(len(T), y.mean())',
      'noisy': 'T[:, 3]',
      'box': 'around(test, 1).mean(axis=1)',
      'median': 'np.median(around(test, 1), axis=1)',
      'wide box': 'around(test, 2).mean(axis=1)',
      'linear': 'denoise(linear_model.Ridge())',
      'forest': 'denoise(ensemble.RandomForestRegressor(60, min_samples_leaf=5, '
      'max_features=8, random_state=0))',
    },
  ),
}
