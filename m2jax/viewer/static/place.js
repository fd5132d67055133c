// The place in the run: selection, tab, phase and filters, with the names of START. The
// fragment of the address has what differs from it, so that a link, a reload and Back work.

const SETTLED_MS = 40; // what a held key passes is neither read nor in the history
const ADDRESS = location.href.split('#')[0];
let known; // the fragment as it was read or written last; another one is a link's
const NARROW = matchMedia('(max-width: 60rem)'); // as in view.css: one column

// What the address says. A key in it is stored, and leaves it.
function readPlace() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (given.has('key')) {
    source.key = given.get('key');
    given.delete('key');
    history.replaceState(null, '', ADDRESS + (String(given) && `#${given}`));
  }
  known = location.hash;
  const place = Object.fromEntries(Object.entries(START).map(([name, value]) => [name, given.get(name) ?? value]));
  return { ...place, phase: PHASES.includes(place.phase) ? place.phase : PHASES[0] };
}

// A new entry of the history for a new selection, unless the page itself made the first.
function writePlace(place) {
  if (location.hash !== known) return; // a link was followed, and its event is to come
  const before = readPlace();
  const said = Object.entries(place).filter(([name, value]) => value !== START[name]);
  const link = said.length ? `#${new URLSearchParams(said)}` : '';
  if (link === location.hash) return;
  const moved = [...SELECTED, 'phase', 'task'].some((name) => before[name] !== place[name]);
  const first = !NARROW.matches && before.phase === place.phase && !SELECTED.some((name) => before[name]);
  history[moved && !first ? 'pushState' : 'replaceState'](null, '', ADDRESS + link);
  known = location.hash;
}

function usePlace(onLink) {
  const [place, setPlace] = useState(readPlace), latest = useRef(place);
  const move = (to) => setPlace(latest.current = to);
  useEffect(() => {
    const onHash = () => { move(readPlace()); onLink(); };
    addEventListener('hashchange', onHash);
    return () => removeEventListener('hashchange', onHash);
  }, []);
  useEffect(() => {
    // A timer ends after the next place is drawn, which may be too late.
    const timer = setTimeout(() => place === latest.current && writePlace(place), SETTLED_MS);
    return () => clearTimeout(timer);
  }, [place]);
  return [place, (change) => move({ ...latest.current, ...change })];
}
