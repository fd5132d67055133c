// What every page has: measures, answers, the status of the job, the form for the key.

const percent = (share) => `${(100 * share).toFixed(1).replace(/\.0$/, '')} %`;

// The width of an element in pixels, so that text in a drawing keeps its size.
function useWidth() {
  const ref = useRef(), [width, setWidth] = useState(0);
  useEffect(() => {
    const watch = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    watch.observe(ref.current);
    return () => watch.disconnect();
  }, []);
  return [ref, width];
}

// What a source answers, asked again when one of `changes` is another.
function useAnswer(ask, changes) {
  const [found, setFound] = useState({});
  useEffect(() => {
    let current = true;
    ask().then((value) => current && setFound({ value }), (error) => current && setFound({ error }));
    return () => { current = false; };
  }, changes);
  return found;
}

// Whether the job works, or what the page last heard of it.
function Status({ problem, status }) {
  const shown = problem || (source.live || status !== 'live' ? status : 'written while it was live');
  return html`<span class=${`status ${problem ? 'off' : status}`} role="status">${shown}</span>`;
}

function KeyForm({ problem, retry }) {
  const [key, setKey] = useState('');
  const send = (event) => { event.preventDefault(); source.key = key; retry(); };
  return html`<form class="keyform" onSubmit=${send}><p role="alert">${problem}</p>
    <p>The key is in WORKDIR/keys/view; a link that a job prints on a terminal has it.</p>
    <input type="password" aria-label="Key" value=${key} onInput=${(e) => setKey(e.target.value)} />
    <button>Open</button></form>`;
}
