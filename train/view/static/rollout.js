// One rollout: how it ended, its calls, and its token sequences.
import { html, hooks, hrefOf } from "view/base.js";
import { BreakCard } from "view/breaks.js";
import { CallDetail, CallList, statusOf } from "view/calls.js";
import { COLORS, Legend, summary, TokenPane } from "view/tokens.js";
import { Strip } from "view/strip.js";
import { Reward } from "view/jobs.js";
import { count, many, seconds } from "view/format.js";

const { useEffect, useMemo, useState } = hooks;

export function RolloutHead({ rollout, tab, row, others }) {
  return html`<header class="head">
    <div class="head-line">
      <h1>${rollout.name}</h1>
      <span class=${`outcome ${rollout.outcome}`}>${rollout.outcome.replaceAll("_", " ")}</span>
      <span>reward <b><${Reward} value=${rollout.reward} /></b></span>
      <span class=${`grade ${rollout.grade ? "yes" : "no"}`}>${rollout.grade ? "✓ training-grade" : "✕ not training-grade"}</span>
      ${!rollout.finished && html`<span class="tag warn">no result.json: it still runs, or the proxy stood alone</span>`}
    </div>
    <p class="dim head-facts">${[rollout.task, rollout.agent, rollout.model, rollout.timing.total ? seconds(rollout.timing.total) : null, many(rollout.calls.length, "call"), many(rollout.segments.length, "sequence")].filter(Boolean).join(" · ")}</p>
    ${row && row.gone && html`<p class="note bad">${rollout.folder} is gone: this is what was read of it.</p>`}
    ${(rollout.error || rollout.verifier_error) && html`<p class="note bad">${rollout.error || rollout.verifier_error}</p>`}
    ${rollout.problems.map((problem) => html`<p class="note bad">The journal is not whole: ${problem}.</p>`)}
    ${!rollout.grade && rollout.reason && html`<p class="note warn">Not training-grade: ${rollout.reason}.</p>`}
    <nav class="tabs" aria-label="Views of this rollout">
      <a href=${hrefOf({ view: "rollout", path: rollout.path })} aria-current=${tab === "calls" ? "page" : undefined}>Calls</a>
      <a href=${hrefOf({ view: "tokens", path: rollout.path })} aria-current=${tab === "tokens" ? "page" : undefined}>Tokens</a>
      ${others.length > 0 && html`<label class="facet"><span class="sr">Compare with another rollout of its group</span>
        <select onChange=${(event) => { if (event.target.value) location.hash = hrefOf({ view: "compare", a: rollout.path, b: event.target.value }); }}>
          <option value="">Compare with…</option>
          ${others.slice(0, 200).map((other) => html`<option value=${other.path}>${other.name}${other.reward === null ? "" : ` (reward ${other.reward})`}</option>`)}
        </select></label>`}
    </nav>
  </header>`;
}

export function Calls({ rollout, words }) {
  const asked = rollout.calls.find((one) => String(one.number) === words.call);
  const call = asked || rollout.calls[0];
  if (!call) return html`<p class="empty">There is no call in its log${rollout.reason ? `: ${rollout.reason}` : ""}.</p>`;
  return html`<div class="two">
    <section class="left" aria-label="Calls and breaks">
      <${CallList} rollout=${rollout} selected=${call.number} />
      ${rollout.breaks.map((one) => html`<${BreakCard} found=${one} onGo=${(of, at) => { location.hash = hrefOf({ view: "tokens", path: rollout.path, of, at }); }} />`)}
      ${rollout.sampling_note && html`<p class="note">${rollout.sampling_note}.</p>`}
    </section>
    <${CallDetail} rollout=${rollout} call=${call} />
  </div>`;
}

export function Tokens({ rollout, words, go }) {
  const of = words.of || (rollout.segments.length ? "s0" : firstCall(rollout));
  const [strip, setStrip] = useState(null);
  const [trouble, setTrouble] = useState(null);
  const [open, setOpen] = useState(false);
  const [least, setLeast] = useState(-1);
  const color = COLORS.some((one) => one.key === words.color) ? words.color : "logprob";
  useEffect(() => {
    let here = true;
    setTrouble(null);
    setOpen(false);
    setLeast(-1);
    if (of) Strip.of(rollout.path, of).then((made) => here && setStrip(made), (error) => here && (setStrip(null), setTrouble(error.message)));
    return () => { here = false; };
  }, [rollout.path, of, rollout.calls.length]);

  const ready = strip && strip.of === of && strip.path === rollout.path ? strip : null;
  const prompt = ready ? ready.index.prompt : 0;
  const whole = ready ? ready.index.tokens : 0;
  const wished = ready ? wishOf(words, ready) : null;
  const unfolded = open || prompt === whole || (wished !== null && wished < prompt);
  const set = (more) => go({ ...words, call: undefined, of, ...more }, { replace: true });
  const segment = of && of[0] === "s" ? rollout.segments[Number(of.slice(1))] : null;

  const steps = useMemo(() => ({
    least: () => {
      if (!ready || !ready.index.least.length) return;
      const next = (least + 1) % ready.index.least.length;
      setLeast(next);
      set({ at: ready.index.least[next] });
    },
    call: (way) => {
      if (!ready) return;
      const here = Number(wished ?? prompt);
      const begins = ready.stretches.map((one) => one.start);
      const next = way > 0 ? begins.find((one) => one > here) : begins.filter((one) => one < here).pop();
      if (next !== undefined) set({ at: next });
    },
    break: () => {
      const starts = rollout.breaks.filter((one) => one.segment_after !== null);
      if (!starts.length) return;
      const number = segment ? segment.number : -1;
      const next = starts.find((one) => one.segment_after > number) || starts[0];
      go({ ...words, call: undefined, of: `s${next.segment_after}`, at: next.index });
    },
    prompt: () => setOpen((open) => !open),
  }), [ready, least, words, rollout]);
  const press = (event) => {
    const keys = { l: steps.least, c: () => steps.call(1), C: () => steps.call(-1), b: steps.break, p: steps.prompt };
    if (keys[event.key]) {
      event.preventDefault();
      keys[event.key]();
    } else if (/^[1-4]$/.test(event.key)) set({ color: COLORS[Number(event.key) - 1].key });
  };
  useEffect(() => {
    const outside = (event) => {
      if (event.metaKey || event.ctrlKey || event.altKey || event.target.closest("input, select, textarea, .pane, dialog")) return;
      press(event);
    };
    addEventListener("keydown", outside);
    return () => removeEventListener("keydown", outside);
  });

  const breaks = rollout.breaks.filter((one) => segment && (one.segment_before === segment.number || one.segment_after === segment.number));
  return html`<div class="token-view">
    <nav class="strips" aria-label="Sequences and calls">
      ${rollout.segments.map((one) => html`<a class="strip" href=${hrefOf({ view: "tokens", path: rollout.path, of: `s${one.number}`, color: words.color })}
        aria-current=${of === `s${one.number}` ? "page" : undefined}>
        ${one.start && html`<span class="tag bad" title="it begins where a sequence broke">⟂</span>`}<b>Sequence ${one.number}</b>
        <span class="dim">${one.kind} · ${one.calls.length > 1 ? `calls ${one.calls[0]}–${one.calls[one.calls.length - 1]}` : `call ${one.calls[0]}`} · ${count(one.sampled)} sampled</span></a>`)}
      <label class="facet"><span class="sr">One call alone</span><select value=${of && of[0] === "c" ? of : ""} onChange=${(event) => { if (event.target.value) go({ view: "tokens", path: rollout.path, of: event.target.value, color: words.color }); }}>
        <option value="">One call alone…</option>
        ${rollout.calls.flatMap((call) => call.sampled.map((_, choice) => html`<option value=${`c${call.number}.${choice}`}>call ${call.number}${call.sampled.length > 1 ? `, choice ${choice}` : ""}${call.complete ? "" : ` (${statusOf(call)})`}</option>`))}
      </select></label>
    </nav>
    ${!of && html`<p class="empty">No token was captured${rollout.reason ? `: ${rollout.reason}` : ""}.</p>`}
    ${trouble && html`<p class="note bad">${trouble}</p>`}
    ${ready && html`
      ${breaks.map((one) => html`<details class="fold seam" open=${words.at === "end" || Number(words.at) === one.index}><summary>⟂ ${segment.number === one.segment_after ? `This sequence begins where call ${one.call} broke off from call ${one.before}` : `This sequence ends: call ${one.call} does not continue it`}: ${one.cause_name}</summary>
        <${BreakCard} found=${one} onGo=${(to, at) => go({ view: "tokens", path: rollout.path, of: to, at, color: words.color })} /></details>`)}
      <div class="toolbar" role="toolbar" aria-label="Colors and jumps">
        <div class="segmented" role="radiogroup" aria-label="Color by">
          ${COLORS.map((one, at) => html`<button role="radio" aria-checked=${color === one.key} disabled=${one.key === "entropy" && !ready.entropies}
            title=${one.key === "entropy" && !ready.entropies ? "no alternatives were captured: start bench proxy with BENCHFLOW_CAPTURE_TOP_LOGPROBS=5 in its environment" : `Color by ${one.hint} (${at + 1})`}
            onClick=${() => set({ color: one.key })}>${one.title}</button>`)}
        </div>
        <button onClick=${steps.least} disabled=${!ready.index.least.length} title="Go to the least likely token, then the next (l)">Least likely <kbd>l</kbd></button>
        <button onClick=${() => steps.call(1)} title="Go to the next call (c; C goes back)">Next call <kbd>c</kbd></button>
        <button onClick=${steps.break} disabled=${!rollout.breaks.length} title="Go to the next break (b)">Next break <kbd>b</kbd></button>
        <span class="grow"></span>
        <${Legend} color=${color} strip=${ready} />
      </div>
      ${ready.index.without_text > 0 && html`<p class="note" role="note">${count(ready.index.without_text)} of ${many(whole, "token")} ${ready.index.without_text === 1 ? "has" : "have"} no text in the log and ${ready.index.without_text === 1 ? "is" : "are"} shown as ⟨id⟩: the engine writes only what it samples. <code>bench view --tokenizer DIR</code> gives every id its text.</p>`}
      <div class="prompt-line">
        ${prompt > 0 && prompt < whole && html`<button aria-expanded=${unfolded} onClick=${() => { if (unfolded && wished !== null && wished < prompt) set({ at: prompt }); setOpen(!unfolded); }}>${unfolded ? "▾ Fold" : "▸ Show"} the prompt: ${many(prompt, "token")} <kbd>p</kbd></button>`}
        <span class="dim num">${summary(ready.index)}</span>
      </div>
      <${TokenPane} strip=${ready} from=${unfolded ? 0 : prompt} at=${wished} color=${color}
        label=${`Tokens of ${of[0] === "s" ? `sequence ${of.slice(1)}` : `call ${of.slice(1)}`}. Arrow keys move, ? shows all keys.`}
        onActive=${(at) => set({ at })} onKey=${press} />`}
  </div>`;
}

// The token that the address asks for.
function wishOf(words, strip) {
  if (words.at === "end") return strip.index.tokens - 1;
  if (words.at !== undefined && /^\d+$/.test(words.at)) return Math.min(Number(words.at), strip.index.tokens - 1);
  if (words.call !== undefined) {
    const found = strip.stretches.find((one) => String(one.call) === words.call);
    if (found) return found.start;
  }
  return null;
}

function firstCall(rollout) {
  const call = rollout.calls.find((one) => one.sampled.length);
  return call ? `c${call.number}.0` : null;
}
