// The page: which view the address asks for, what is at the top, and the keys.
import { draw, html, hooks, hrefOf } from "view/base.js";
import { ask, askOnce, forget, inFile } from "view/source.js";
import { Calls, RolloutHead, Tokens } from "view/rollout.js";
import { Compare } from "view/compare.js";
import { Jobs } from "view/jobs.js";
import { count } from "view/format.js";

const { useCallback, useEffect, useMemo, useRef, useState } = hooks;
const KEYS = [
  ["/", "filter the rollouts"],
  ["↑ ↓", "next rollout in the table; next line of tokens"],
  ["← →", "next token"],
  ["Page, Home, End", "further in the tokens"],
  ["l", "the least likely token, then the next"],
  ["c  C", "next call, call before"],
  ["b", "next break"],
  ["p", "show or fold the prompt"],
  ["1 2 3 4", "color by probability, entropy, training, call"],
  ["[  ]", "rollout before, next rollout"],
  ["u", "up: from tokens to calls to the table"],
  ["t", "dark or light"],
  ["?", "these keys"],
];

function App() {
  const words = useWords();
  const [job, trouble] = useJob();
  const [help, setHelp] = useState(false);
  const view = words.view || "jobs";
  const go = useCallback((next, { replace } = {}) => {
    if (replace) replaceWords(next);
    else location.hash = hrefOf(next);
  }, []);
  useEffect(() => {
    const press = (event) => {
      if (event.metaKey || event.ctrlKey || event.altKey || event.target.closest("input, select, textarea")) return;
      if (event.key === "?") setHelp((open) => !open);
      else if (event.key === "Escape") setHelp(false);
      else if (event.key === "t") turnTheme();
      else if (event.key === "u") go(up(words));
      else if ((event.key === "[" || event.key === "]") && job && words.path) {
        const at = job.rows.findIndex((row) => row.path === words.path);
        const next = job.rows[at + (event.key === "]" ? 1 : -1)];
        if (next) go({ ...words, path: next.path, call: undefined, of: undefined, at: undefined });
      } else return;
      event.preventDefault();
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, [words, job, go]);
  useEffect(() => {
    document.title = [words.path ? words.path.split("/").pop() : null, job && job.name, "bench view"].filter(Boolean).join(" · ");
  }, [words.path, job && job.name]);

  return html`
    <${Top} job=${job} words=${words} onHelp=${() => setHelp(true)} />
    ${trouble && html`<p class="note bad" role="alert">${trouble}</p>`}
    ${job && job.left_out_note && html`<p class="note warn">${job.left_out_note}</p>`}
    ${job && view === "jobs" && html`<${Notes} job=${job} />`}
    ${!job && !trouble && html`<main><p class="loading">Looking for rollouts…</p></main>`}
    ${job && (view === "rollout" || view === "tokens"
      ? html`<${Rollout} job=${job} words=${words} view=${view} go=${go} />`
      : view === "compare" ? html`<${Compare} job=${job} words=${words} go=${go} />`
      : html`<${Jobs} job=${job} words=${words} go=${go} />`)}
    <${Help} open=${help} onClose=${() => setHelp(false)} />`;
}

function Top({ job, words, onHelp }) {
  const state = job && job.state;
  return html`<header class="top">
    <a class="brand" href="#">bench view</a>
    <nav class="crumbs" aria-label="Where you are">
      ${job && html`<a href=${hrefOf({ q: words.q })} title=${job.root}>${job.name}</a>`}
      ${words.path && html`<span aria-hidden="true">/</span><a href=${hrefOf({ view: "rollout", path: words.path })}>${words.path.split("/").pop()}</a>`}
      ${words.view === "tokens" && html`<span aria-hidden="true">/</span><span>tokens</span>`}
      ${words.view === "compare" && html`<span aria-hidden="true">/</span><span>compare</span>`}
    </nav>
    <span class="grow"></span>
    ${state && html`<span class=${`state ${state.kind}`} title=${state.detail}>${inFile ? "a file, as it was" : state.kind}</span>`}
    ${job && job.read < job.total && html`<span class="dim num" role="status">${count(job.read)} of ${count(job.total)} logs read</span>`}
    <button class="icon" onClick=${turnTheme} aria-label="Dark or light" title="Dark or light (t)">◐</button>
    <button class="icon" onClick=${onHelp} aria-label="Keys" title="Keys (?)">?</button>
  </header>`;
}

function Notes({ job }) {
  const [open, setOpen] = useState(false);
  const notes = [...(job.state.kind === "running" || job.state.kind === "finished" ? [] : [job.state.detail]), ...job.notes];
  if (!notes.length) return null;
  const shown = open ? notes : notes.slice(0, 2);
  return html`<div class="notes">${shown.map((text) => html`<p class="note warn">${text}</p>`)}
    ${notes.length > 2 && html`<button onClick=${() => setOpen(!open)}>${open ? "fewer" : `${notes.length - 2} more`}</button>`}</div>`;
}

function Rollout({ job, words, view, go }) {
  const [rollout, setRollout] = useState(null);
  const [trouble, setTrouble] = useState(null);
  const row = useMemo(() => job.rows.find((one) => one.path === words.path), [job, words.path]);
  const seen = row ? `${row.fresh}-${row.all_calls}-${row.finished}-${row.gone}` : "";
  useEffect(() => {
    let here = true;
    setTrouble(null);
    ask("rollout", { path: words.path }).then(
      (found) => here && setRollout(found), (error) => here && setTrouble(error.message));
    return () => { here = false; };
  }, [words.path, seen]);
  const others = useMemo(() => (row ? job.rows.filter((one) => one.group === row.group && one.path !== row.path) : []), [job, row]);
  const ready = rollout && rollout.path === words.path ? rollout : null;
  return html`<main class=${`rollout ${view}`}>
    ${trouble && html`<p class="note bad" role="alert">${trouble}${ready ? " What is below was read before." : ""}</p>`}
    ${!ready && !trouble && html`<p class="loading">Reading the log…</p>`}
    ${ready && html`<${RolloutHead} rollout=${ready} row=${row} others=${others} tab=${view === "tokens" ? "tokens" : "calls"} />
      ${view === "tokens" ? html`<${Tokens} rollout=${ready} words=${words} go=${go} />` : html`<${Calls} rollout=${ready} words=${words} />`}`}
  </main>`;
}

function Help({ open, onClose }) {
  const dialog = useRef(null);
  useEffect(() => {
    if (open && !dialog.current.open) dialog.current.showModal();
    if (!open && dialog.current.open) dialog.current.close();
  }, [open]);
  return html`<dialog ref=${dialog} onClose=${onClose} aria-labelledby="keys-title">
    <h2 id="keys-title">Keys</h2>
    <dl class="keys">${KEYS.map(([key, what]) => html`<dt>${key.split(" ").filter(Boolean).map((one) => html`<kbd>${one.replace(",", "")}</kbd> `)}</dt><dd>${what}</dd>`)}</dl>
    <p class="dim">Every view has an address of its own: copy it to come back to this token.</p>
    <button onClick=${onClose}>Close</button>
  </dialog>`;
}

function up(words) {
  if (words.view === "tokens") return { view: "rollout", path: words.path };
  return {};
}

// The words after # in the address. A key that is held down moves on 30 times a second, more often than browsers let an
// address change: the page follows at once, the address when there is a pause.
let toWrite = null;
let tellWords = () => {};

function useWords() {
  const [words, setWords] = useState(wordsIn(location.hash));
  useEffect(() => {
    const changed = () => {
      clearTimeout(toWrite);
      setWords(wordsIn(location.hash));
    };
    tellWords = setWords;
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return words;
}

function replaceWords(next) {
  const address = hrefOf(next);
  tellWords(wordsIn(address));
  clearTimeout(toWrite);
  toWrite = setTimeout(() => history.replaceState(null, "", address), 120);
}

function wordsIn(address) {
  return Object.fromEntries(new URLSearchParams(address.slice(1)));
}

// The job, asked for again as long as there is something new to come.
function useJob() {
  const [job, setJob] = useState(null);
  const [trouble, setTrouble] = useState(null);
  const latest = useRef(null);
  useEffect(() => {
    let timer = null;
    let ended = false;
    const look = async () => {
      let pause = 5000;
      try {
        if (!document.hidden || !latest.current) {
          const answer = await (inFile ? askOnce : ask)("job", latest.current ? { since: latest.current.version } : {});
          if (ended) return;
          setTrouble(null);
          if (!latest.current || answer.version !== latest.current.version) {
            latest.current = joined(latest.current, answer);
            forget();
            setJob(latest.current);
          }
          if (answer.read < answer.total || !answer.scanned) pause = 400;
          else if (answer.state.kind === "running" || answer.state.kind === "waiting") pause = 1000;
        }
      } catch (error) {
        setTrouble(error.message);
      }
      if (!ended && !inFile) timer = setTimeout(look, pause);
    };
    look();
    return () => { ended = true; clearTimeout(timer); };
  }, []);
  return [job, trouble];
}

function joined(before, answer) {
  if (!before) return answer;
  const changed = new Map(answer.rows.map((row) => [row.path, row]));
  const rows = before.rows.map((row) => {
    const now = changed.get(row.path);
    changed.delete(row.path);
    return now || row;
  });
  return { ...answer, rows: [...rows, ...changed.values()] };
}

function turnTheme() {
  const now = document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
  try { localStorage.setItem("bench-view-theme", document.documentElement.dataset.theme); } catch { /* a file may keep nothing */ }
  dispatchEvent(new Event("theme"));
}

try {
  const theme = localStorage.getItem("bench-view-theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch { /* a file may keep nothing */ }
const place = document.getElementById("app");
place.replaceChildren();
draw(html`<${App} />`, place);
