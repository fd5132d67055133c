// Where the data comes from: the API of a server, or elements of this file.
// Both sources have: summary(), page(condition, before), histogram(condition), curves(),
// findings(), group(item), session(session), annotations(session), live. A server also has
// annotate(session, fields) and, of two runs, summary(run), tasks() and task().

const { html, render, h, useState, useEffect, useLayoutEffect, useRef, useMemo } = htmPreact;

class ApiSource {
  live = true;

  get key() { return sessionStorage.getItem('key') ?? ''; }
  set key(value) { sessionStorage.setItem('key', value.trim()); }

  async get(path, options = {}) {
    const headers = { Authorization: `Bearer ${this.key || '-'}`, ...options.headers };
    const response = await fetch(`/view/api/${path}`, { ...options, headers });
    const body = await response.json().catch(() => ({}));
    if (!response.ok) {
      const error = new Error(body.error?.message ?? `HTTP ${response.status}`);
      error.status = response.status;
      throw error;
    }
    return body;
  }

  // A query with the parameters that have a value.
  ask(path, given) {
    const used = Object.entries(given).filter(([, value]) => value !== '' && value != null);
    return this.get(`${path}?${new URLSearchParams(used)}`);
  }

  summary(run) { return this.ask('run', { run }); }
  page(condition, before) { return this.ask('list', { ...condition, before }); }
  histogram(condition) { return this.ask('histogram', condition); }
  curves() { return this.get('curves'); }
  findings() { return this.get('findings'); }
  tasks(run, condition) { return this.ask('tasks', { ...condition, run }); }
  task(run, condition, task) { return this.ask('task', { ...condition, run, task }); }

  group(item) { return this.get(`group/${encodeURIComponent(item)}`); }
  session(session) { return this.get(`session/${encodeURIComponent(session)}`); }
  annotations(session) { return this.get(`annotations/${encodeURIComponent(session)}`); }

  annotate(session, fields) {
    return this.get(`annotations/${encodeURIComponent(session)}`, {
      method: 'POST', body: JSON.stringify(fields),
      headers: { 'Content-Type': 'application/json' },
    });
  }
}

class FileSource {
  live = false;
  chunks = new Map(); // the last ones that were decompressed

  async index() {
    this.found ??= await unpack('data-index');
    return this.found;
  }

  async summary() { return (await this.index()).summary; }

  // Without a text all matching rows at once; else those of the next elements.
  async page(condition, before) {
    const index = await this.index();
    const column = columnsOf(index), matching = this.#matching(index, column, condition);
    if (!condition.text) {
      return this.#answer(index, matching.map(([row]) => row), column, condition, null);
    }
    const names = new Map();
    for (const [row, i] of matching) {
      const name = this.#element(index, row[column.item], i);
      names.set(name, [...(names.get(name) ?? []), row]);
    }
    const all = [...names], start = before ?? 0, wanted = condition.text.toLowerCase();
    const rows = [], begun = performance.now();
    let next = start;
    while (next < all.length && performance.now() - begun < 150) {
      const [name, candidates] = all[next++];
      const bundle = await this.#chunk(name);
      const hits = new Map(bundle.trajectories.map((t) => [t.session, hitOf(textOf(t), wanted)]));
      rows.push(...candidates.map((row) => [...row, hits.get(row[column.session])])
        .filter((row) => row.at(-1)));
    }
    return this.#answer(
      index, rows, column, condition, next < all.length ? next : null);
  }

  #matching(index, column, condition) {
    this.steps ??= new Map(index.items.map(([item, , , , state, , step]) => [item, state === 'taken' ? step : null]));
    const known = { steps: this.steps, flagged: index.summary.flagged };
    return index[condition.phase].map((row, i) => [row, i])
      .filter(([row]) => matches(row, column, condition, known));
  }

  async histogram(condition) {
    const index = await this.index(), column = columnsOf(index), edges = index.edges[condition.phase];
    const rows = this.#matching(index, column, condition);
    return { edges, counts: countsOf(edges, rows.map(([row]) => row[column[rewardOf(condition)]])) };
  }

  async curves() { return (await this.index()).curves; }
  async findings() { return (await this.index()).findings; }

  #answer(index, rows, column, condition, before) {
    if (condition.phase === 'eval') return { items: [], rows, before };
    const left = new Set(rows.map((row) => row[column.item]));
    const any = !Object.keys(condition).some((name) => name !== 'phase' && condition[name]);
    return { items: any ? index.items : index.items.filter(([i]) => left.has(i)),
      rows, before };
  }

  #element(index, item, place) {
    if (item >= 0) return `data-group-${item}`;
    return `data-eval-${Math.floor(place / index.evaluations_per_chunk)}`;
  }

  async #chunk(name) {
    let found = this.chunks.get(name);
    if (!found) {
      found = await unpack(name);
      this.chunks.set(name, found);
      if (this.chunks.size > 8) this.chunks.delete(this.chunks.keys().next().value);
    }
    return found;
  }

  group(item) { return this.#chunk(`data-group-${item}`); }

  async session(session) {
    const index = await this.index();
    const [name, item] = ['session', 'item'].map((x) => index.summary.listed.indexOf(x));
    const place = index.eval.findIndex((row) => row[name] === session);
    const row = index.eval[place] ?? index.rl.find((row) => row[name] === session);
    if (!row) throw new Error('the run has none of that name');
    const bundle = await this.#chunk(this.#element(index, row[item], place));
    this.notes = bundle.annotations ?? {};
    const own = (x) => x.session === session;
    return { ...bundle, trajectories: bundle.trajectories.filter(own),
      completions: bundle.completions.filter(own) };
  }

  async annotations(session) { return this.notes?.[session] ?? []; }
}

const columnsOf = (index) => Object.fromEntries(index.summary.listed.map((name, i) => [name, i]));
const rewardOf = ({ phase }) => (phase === 'eval' ? 'success' : 'total');

function matches(row, column, condition, { steps, flagged }) {
  const { family, end_reason, outcome, flag, step, least_s, most_s, least_reward, most_reward, rows } = condition;
  const reward = row[column[rewardOf(condition)]] ?? NaN, flags = flagsOf(flagged, row[column.session]);
  if (family && row[column.family] !== family) return false;
  if (end_reason && row[column.end_reason] !== end_reason) return false;
  if (outcome && (row[column.success] >= 1) !== (outcome === 'success')) return false;
  if (flag && !(flag === 'any' ? flags.length : flags.includes(flag))) return false;
  if (step && steps.get(row[column.item]) !== Number(step)) return false;
  if (least_reward && !(reward >= Number(least_reward))) return false;
  if (most_reward && !(reward < Number(most_reward))) return false;
  if (least_s && row[column.wall_s] < Number(least_s)) return false;
  if (rows) {
    const [first, last] = rows.split('-').map(Number);
    if (row[column.row] < first || row[column.row] > last) return false;
  }
  return !(most_s && row[column.wall_s] > Number(most_s));
}

function textOf(trajectory) {
  const texts = (trajectory.steps ?? []).map((step) => `${step[3]}\n${step[1]}`);
  return [trajectory.task, trajectory.error, trajectory.answer, ...texts].join('\n');
}

// The first place of a lower-case text, with what is around it.
function hitOf(text, wanted) {
  const at = text.toLowerCase().indexOf(wanted), start = Math.max(at - 16, 0);
  return at < 0 ? '' : (start ? '…' : '')
    + text.slice(start, at + wanted.length + 60).replace(/\s/g, ' ');
}

// A condition as sources take it: a stage is the rows of its evaluation, 0-0 if none is left.
function rowsOf({ stage, stage_b, task, ...condition }, summary) {
  const [, first, last] = summary.stages.find(([name]) => name === stage) ?? [];
  return { ...condition, rows: stage ? `${first ?? 0}-${last ?? 0}` : '' };
}

// The JSON value of an element, once the browser has read it completely.
async function unpack(id) {
  for (;;) {
    const element = document.getElementById(id);
    const complete = document.readyState !== 'loading';
    if (element && (complete || element.nextSibling)) {
      const bytes = Uint8Array.from(atob(element.textContent), (c) => c.charCodeAt(0));
      const stream = new Blob([bytes]).stream();
      return new Response(stream.pipeThrough(new DecompressionStream('gzip'))).json();
    }
    if (complete) throw new Error(`this file has no ${id}: it is not complete`);
    await new Promise((done) => setTimeout(done, 30));
  }
}

// A session may be called 'constructor'.
const flagsOf = (flagged, session) => (Object.hasOwn(flagged, session) ? flagged[session] : []);

// A bundle with what views ask for: paths, terms and token values of completions.
class Bundle {
  constructor(data, unit, annotations = []) {
    Object.assign(this, data);
    this.depths = []; // of each segment's first token
    for (const [parent] of this.segments) {
      this.depths.push(parent < 0 ? 0 : this.depths[parent] + this.segments[parent][1].length);
    }
    this.through = this.segments.map(() => []); // completions by segment
    this.byId = new Map(this.completions.map((c) => [c.id, c]));
    this.extended = new Set(this.completions.map((c) => c.parent));
    for (const c of this.completions) {
      c.trajectory = this.trajectories.find((t) => t.session === c.session);
      c.logprob = (c.logprobs ?? []).map((value) => value * unit);
      c.version = (c.versions ?? []).flatMap(([v, n]) => Array(n).fill(v));
      c.extra = {};
      for (const s of this.path(c)) this.through[s].push(c);
    }
    for (const note of annotations) {
      const c = note.kind === 'tokens' && this.byId.get(note.completion);
      if (c) c.extra[note.name] = note;
    }
  }

  // Segments from the root to the completion's end.
  path(completion) {
    const found = [];
    for (let s = completion.leaf ?? -1; s >= 0; s = this.segments[s][0]) found.push(s);
    return found.reverse();
  }

  // Completions that no other one extends: the branches of a trajectory.
  branches(session) {
    return this.completions.filter(
      (c) => c.session === session && !this.extended.has(c.id));
  }

  // The token at a place of a segment, with its loss terms.
  token(segment, offset) {
    const depth = this.depths[segment] + offset, id = this.segments[segment][1][offset];
    const terms = [];
    for (const c of this.through[segment]) {
      const at = depth - c.prompt_tokens;
      if (at < 0 || at >= c.response_tokens) continue;
      const learner = c.extra.learner_logprob?.values[at];
      terms.push({
        completion: c, at, logprob: c.logprob[at], version: c.version[at],
        advantage: c.advantage, weight: c.weight, learner,
        entropy: c.extra.entropy?.values[at],
        mismatch: learner === undefined ? undefined : learner - c.logprob[at],
      });
    }
    return { id, depth, text: this.vocab[id], terms };
  }
}

const source = document.getElementById('data-index') ? new FileSource() : new ApiSource();
