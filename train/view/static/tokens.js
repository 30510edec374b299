// A token sequence on the screen: its lines, what is known of one token, and what the colors mean.
import { html, hooks } from "view/base.js";
import { count, logprob, many, probability, quoted } from "view/format.js";
import { PaneView } from "view/pane.js";
import { CALL_COLORS } from "view/strip.js";

const { useEffect, useLayoutEffect, useRef, useState } = hooks;

export const COLORS = [
  { key: "logprob", title: "Probability", hint: "how likely the token was when it was sampled" },
  { key: "entropy", title: "Entropy", hint: "how undecided the model was, at least, from the alternatives captured" },
  { key: "mask", title: "Training", hint: "what the trainer trains on" },
  { key: "call", title: "Call", hint: "which call sampled it" },
];

// `from`: the first token shown; `at`: the token to go to; `onActive(at)`: the reader is there now.
export function TokenPane({ strip, from, at, color, label, marked, onActive, onKey }) {
  const pane = useRef(null);
  const field = useRef(null);
  const map = useRef(null);
  const view = useRef(null);
  const [card, setCard] = useState(null);
  const handlers = useRef({});
  handlers.current = { onActive, onKey };

  useLayoutEffect(() => {
    const made = new PaneView(pane.current, field.current, map.current, strip, from, marked, {
      card: setCard,
      active: (token) => handlers.current.onActive && handlers.current.onActive(token),
      key: (event, token) => handlers.current.onKey && handlers.current.onKey(event, token),
    });
    view.current = made;
    if (at !== undefined && at !== null) made.goTo(at, false);
    return () => made.end();
  }, [strip, from]);
  useEffect(() => {
    if (at !== undefined && at !== null && view.current) view.current.wished(at);
  }, [at]);
  useEffect(() => view.current && view.current.paint(color), [color, strip, from]);

  return html`<div class="strip-box" data-color=${color}>
    <div class="pane" ref=${pane} tabindex="0" role="listbox" aria-label=${label}>
      <div class="field" ref=${field} role="none"></div>
    </div>
    <div class="map" ref=${map} aria-hidden="true"><canvas></canvas><div class="window"></div></div>
    ${card && html`<${Card} ...${card} strip=${strip} />`}
  </div>`;
}

function Card({ token, x, y, above, dock, strip, pinned }) {
  const box = useRef(null);
  useLayoutEffect(() => {
    const style = box.current.style;
    const width = box.current.offsetWidth;
    const height = box.current.offsetHeight;
    style.left = `${Math.max(8, Math.min(x, window.innerWidth - width - 8))}px`;
    if (dock) {
      // Beside the text that is read, in the half of the pane where the token is not.
      style.left = `${dock.right - width - 32}px`;
      style.top = (y + above) / 2 > (dock.top + dock.bottom) / 2 ? `${dock.top + 12}px` : `${Math.max(8, dock.bottom - height - 12)}px`;
      return;
    }
    const below = y + height + 8 < window.innerHeight;
    style.top = below ? `${y}px` : `${Math.max(8, above - height)}px`;
  });
  const one = token.stretch;
  return html`<div class="card ${pinned ? "pinned" : ""}" ref=${box} role="status" aria-live=${pinned ? "polite" : "off"}>
    <div class="card-text">${token.text === null ? html`<em>no text known</em>` : quoted(token.text)}</div>
    <dl>
      <dt>id</dt><dd>${token.id === null ? "not captured" : token.id}${token.special && html` <span class="tag">special</span>`}</dd>
      ${token.logprob !== null && html`<dt>probability</dt><dd><b>${probability(token.logprob)}</b></dd>
        <dt>logprob</dt><dd>${logprob(token.logprob)}</dd>`}
      ${token.entropy !== undefined && html`<dt>entropy</dt><dd>≥ ${token.entropy.toFixed(3)} nats</dd>`}
      <dt>where</dt><dd>${one ? `call ${one.call}${one.choice ? `, choice ${one.choice}` : ""}, token ${count(token.at - one.start)}` : token.at < strip.index.prompt ? "prompt" : "environment, template"}</dd>
      <dt>training</dt><dd>${one ? (one.trained ? "sampled, trained on" : "sampled, not trained here") : "context, mask 0"}</dd>
      <dt>position</dt><dd>${count(token.at)} of ${count(strip.index.tokens)}</dd>
    </dl>
    ${token.top && html`<table class="alternatives"><caption>alternatives captured</caption><tbody>
      ${token.top.slice(0, 8).map(([text, value]) => html`<tr class=${text === token.text ? "own" : ""}>
        <td class="alt">${quoted(text)}</td><td class="num">${probability(value)}</td>
        <td><span class="share"><span style=${{ width: `${Math.exp(value) * 100}%` }}></span></span></td></tr>`)}
    </tbody></table>`}
  </div>`;
}

export function Legend({ color, strip }) {
  if (color === "call") {
    const calls = [...new Set(strip.stretches.map((one) => one.call))];
    return html`<div class="legend" aria-label="What the colors mean">
      ${calls.slice(0, 12).map((call) => html`<span class="chip k${call % CALL_COLORS}">call ${call}</span>`)}
      ${calls.length > 12 && html`<span class="dim">and ${calls.length - 12} more</span>`}
      <span class="chip context">context</span></div>`;
  }
  if (color === "mask") {
    return html`<div class="legend" aria-label="What the colors mean"><span class="chip trained">trained on</span>
      <span class="chip untrained">sampled, not trained here</span><span class="chip context">context</span></div>`;
  }
  const ends = color === "entropy"
    ? ["< 0.1", "0.1", "0.3", "0.6", "1", "1.5", "2", "≥ 3 nats"]
    : ["≥ 90%", "60", "35", "15", "5", "1", "0.1", "< 0.1%"];
  return html`<div class="legend ramp" aria-label="What the colors mean, from sure to unlikely">
    ${ends.map((end, step) => html`<span class="chip ${color === "entropy" ? "e" : "p"}${step}">${end}</span>`)}</div>`;
}

export function summary(index) {
  const mean = index.logprobs ? index.logprob_sum / index.logprobs : null;
  return [
    many(index.tokens, "token"),
    `${count(index.trained)} trained on`,
    mean === null ? "no logprobs" : `mean logprob ${logprob(mean)}`,
  ].join(" · ");
}
