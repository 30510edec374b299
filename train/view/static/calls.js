// The calls of a rollout: when each ran, what continues what, and what one of them said.
import { html, hooks, hrefOf } from "view/base.js";
import { askOnce } from "view/source.js";
import { count, many, milliseconds, time } from "view/format.js";

const { useEffect, useMemo, useState } = hooks;
const ROW = 48;
const LANE = 14;
const CLIP = 3000;

export function CallList({ rollout, selected }) {
  const lanes = useMemo(() => lanesOf(rollout), [rollout]);
  const span = useMemo(() => spanOf(rollout.calls), [rollout]);
  const wide = Math.max(24, (Math.max(0, ...lanes.lane) + 1) * LANE + 12);
  return html`<ol class="calls" aria-label="Calls, in the order they began">
    <svg class="graph" width=${wide} height=${rollout.calls.length * ROW} aria-hidden="true">
      ${lanes.edges.map(([from, to, kind]) => html`<path class=${kind} d=${edge(lanes.lane[from], from, lanes.lane[to], to)} />`)}
      ${rollout.calls.map((call, at) => html`<circle cx=${x(lanes.lane[at])} cy=${at * ROW + ROW / 2} r="5"
        class=${call.complete ? "whole" : call.outcome === "ok" ? "hollow" : "failed"} />`)}
    </svg>
    ${rollout.calls.map((call) => html`<li style=${{ paddingLeft: `${wide}px` }}>
      <a class=${`call ${call.number === selected ? "selected" : ""}`} aria-current=${call.number === selected ? "true" : undefined}
        href=${hrefOf({ view: "rollout", path: rollout.path, call: call.number })}>
        <span class="call-head"><b>call ${call.number}</b>
          <span class="tag">${call.kind}</span>
          ${call.break !== null && html`<span class="tag bad">⟂ break</span>`}
          ${!call.complete && html`<span class="tag warn">${statusOf(call)}</span>`}
          ${call.retried && html`<span class="tag">retried</span>`}
        </span>
        <span class="call-numbers num">${count(call.prompt)} → ${call.sampled.map((one) => count(one)).join(" + ") || "–"}<span class="dim"> tokens</span></span>
        <span class="bar-track">${bar(call, span)}</span>
        <span class="call-time num">${milliseconds(call.duration_ms)}</span>
      </a></li>`)}
  </ol>`;
}

function bar(call, span) {
  const began = time(call.began);
  if (!began || call.duration_ms === null || !span.long) return null;
  const left = ((began - span.from) / span.long) * 100;
  const wide = Math.max(0.6, (call.duration_ms / span.long) * 100);
  const first = call.ttft_ms === null || !call.duration_ms ? 0 : Math.min(100, (call.ttft_ms / call.duration_ms) * 100);
  return html`<span class="run" style=${{ left: `${Math.min(left, 99)}%`, width: `${Math.min(wide, 100 - Math.min(left, 99))}%` }}
    title=${`${milliseconds(call.duration_ms)}, first token after ${milliseconds(call.ttft_ms)}`}><span class="until-first" style=${{ width: `${first}%` }}></span></span>`;
}

function spanOf(calls) {
  const begins = calls.map((call) => time(call.began)).filter(Boolean);
  if (!begins.length) return { from: 0, long: 0 };
  const from = Math.min(...begins);
  const ends = calls.map((call) => (time(call.began) ? time(call.began).getTime() + (call.duration_ms || 0) : from));
  return { from, long: Math.max(1, Math.max(...ends) - from) };
}

// A lane a line of calls that continue each other; what serves the agent beside them gets lanes of its own.
function lanesOf(rollout) {
  const place = new Map(rollout.calls.map((call, at) => [call.number, at]));
  const lane = [];
  const edges = [];
  const goesOn = new Set();
  let used = 0;
  rollout.calls.forEach((call, at) => {
    const broken = call.break === null ? null : rollout.breaks[call.break].before;
    const before = place.get(call.parent ?? broken ?? call.follows ?? call.retry_of);
    if (before === undefined || before >= at) {
      lane[at] = at === 0 || !call.counts ? (at === 0 ? 0 : Math.max(1, used)) : call.complete && call.parent === null && used ? used + 1 : 0;
    } else if (goesOn.has(before)) lane[at] = used + 1;
    else lane[at] = lane[before];
    lane[at] = Math.min(lane[at], 7);
    used = Math.max(used, lane[at]);
    if (before !== undefined && before < at) {
      goesOn.add(before);
      edges.push([before, at, call.parent !== null ? "continues" : call.break !== null ? "breaks" : "follows"]);
    }
  });
  return { lane, edges };
}

function x(lane) {
  return 14 + lane * LANE;
}

function edge(fromLane, from, toLane, to) {
  const top = from * ROW + ROW / 2;
  const bottom = to * ROW + ROW / 2;
  if (fromLane === toLane) return `M${x(fromLane)} ${top}V${bottom}`;
  return `M${x(fromLane)} ${top}C${x(fromLane)} ${top + 30} ${x(toLane)} ${bottom - 30} ${x(toLane)} ${bottom}`;
}

export function statusOf(call) {
  if (call.unreadable) return "another schema";
  if (call.outcome !== "ok") return call.outcome === "error" ? `error ${call.status || ""}` : call.outcome;
  return call.captured ? "not complete" : "not captured";
}

export function CallDetail({ rollout, call }) {
  const [detail, setDetail] = useState(null);
  const [trouble, setTrouble] = useState(null);
  useEffect(() => {
    let here = true;
    setDetail(null);
    setTrouble(null);
    askOnce("call", { path: rollout.path, call: call.number }).then(
      (found) => here && setDetail(found), (error) => here && setTrouble(error.message));
    return () => { here = false; };
  }, [rollout.path, call.number, rollout.calls.length]);
  return html`<section class="detail" aria-label=${`Call ${call.number}`}>
    <header class="detail-head">
      <h2>Call ${call.number}</h2>
      <div class="row">
        ${call.segments.map((at) => html`<a class="button primary" href=${hrefOf({ view: "tokens", path: rollout.path, of: `s${at}`, call: call.number })}>Tokens in sequence ${at}</a>`)}
        ${call.captured && call.sampled.map((_, choice) => html`<a class="button" href=${hrefOf({ view: "tokens", path: rollout.path, of: `c${call.number}.${choice}` })}>Tokens of ${call.sampled.length > 1 ? `choice ${choice}` : "this call alone"}</a>`)}
      </div>
    </header>
    ${call.foreign && html`<p class="note bad">This line holds neither a request nor a response: another program wrote it.</p>`}
    ${call.unreadable && html`<p class="note bad">${call.unreadable}</p>`}
    ${call.error && html`<p class="note bad">The engine answered ${call.status}: ${visible(call.error)}</p>`}
    ${call.why.map((why) => html`<p class="note warn"><b>${why.field.replaceAll("_", " ")} not captured</b> (${why.code}). ${why.detail}</p>`)}
    ${call.ambiguous.length > 0 && html`<p class="note warn">Calls ${call.ambiguous.join(", ")} are continued equally well; which one is not guessed.</p>`}
    ${call.follows !== null && html`<p class="note warn">It follows call ${call.follows}, which is not complete, so no sequence joins them.</p>`}
    <dl class="facts">
      ${fact("finish reason", call.finish.filter(Boolean).join(", "))}
      ${fact("latency", milliseconds(call.duration_ms))}
      ${fact("first token", milliseconds(call.ttft_ms))}
      ${fact("prompt", call.prompt === null ? "not captured" : many(call.prompt, "token"))}
      ${fact("sampled", call.sampled.map((one) => many(one, "token")).join(" + "))}
      ${fact("continues", call.parent !== null ? `call ${call.parent}` : call.break !== null ? `nothing: it breaks off from call ${rollout.breaks[call.break].before}` : "nothing")}
      ${fact("policy version", [...new Set([call.policy_version, call.policy_version_end].filter(Boolean))].join(" → "))}
      ${fact("engine", [call.engine, call.engine_version].filter(Boolean).join(" "))}
      ${fact("model", call.model)}
      ${fact("dialect", [call.dialect, call.stream ? "streamed" : null].filter(Boolean).join(", "))}
      ${fact("replica", call.upstream)}
      ${fact("began", call.began && call.began.replace("T", " "))}
    </dl>
    ${trouble && html`<p class="note bad">${trouble}</p>`}
    ${!detail && !trouble && html`<p class="loading">Loading messages…</p>`}
    ${detail && html`<${Detail} rollout=${rollout} detail=${detail} call=${call} />`}
  </section>`;
}

function fact(name, value) {
  return value ? html`<div><dt>${name}</dt><dd>${value}</dd></div>` : null;
}

function Detail({ rollout, detail, call }) {
  const sampling = { ...detail.parameters };
  return html`
    ${detail.same && html`<${Earlier} rollout=${rollout} same=${detail.same} />`}
    ${detail.messages.map((message, at) => html`<${Message} key=${at} message=${message} />`)}
    ${detail.replies.map((reply, at) => html`<${Message} key=${`r${at}`} message=${reply.message} reply=${detail.replies.length > 1 ? `reply, choice ${at}` : "reply"} finish=${reply.finish_reason} />`)}
    ${detail.raw && html`<${Message} message=${{ role: "prompt", content: textOf(detail.raw.prompt) }} />${detail.raw.texts.map((text) => html`<${Message} message=${{ role: "completion", content: text }} reply="completion" />`)}`}
    ${detail.error && !call.error && html`<${Fold} title="Response" text=${JSON.stringify(detail.error, null, 2)} open />`}
    ${detail.tools.length > 0 && html`<details class="fold"><summary>Tools <span class="dim">${many(detail.tools.length, "tool")}: ${detail.tools.map((tool) => (tool.function || tool).name).join(", ")}</span></summary>
      ${detail.tools.map((tool) => html`<pre class="code" tabindex="0">${visible(JSON.stringify(tool.function || tool, null, 2))}</pre>`)}</details>`}
    <details class="fold" open><summary>Sampling <span class="dim">${call.not_plain.length ? `not plain: ${call.not_plain.join(", ")}` : "plain"}</span></summary>
      <dl class="facts">${Object.entries(sampling).map(([name, value]) => fact(name, short(value)))}
      ${detail.sampling.session && Object.entries(detail.sampling.session).map(([name, value]) => fact(`${name} (session)`, short(value)))}
      ${detail.sampling.engine_defaults && Object.entries(detail.sampling.engine_defaults).filter(([name]) => !(name in sampling) && !(name in detail.sampling.session)).map(([name, value]) => fact(`${name} (engine's own)`, short(value)))}</dl></details>
    <details class="fold"><summary>Request <span class="dim">${detail.path}</span></summary>
      <dl class="facts">${fact("request id", detail.request_id)}${fact("response id", detail.response_id)}
      ${fact("usage", detail.usage ? short(detail.usage) : null)}${fact("headers", short(detail.headers))}
      ${fact("dropped fields", detail.dropped_fields && detail.dropped_fields.length ? detail.dropped_fields.join(", ") : null)}
      ${fact("secrets taken out", detail.secrets_seen ? String(detail.secrets_seen) : null)}</dl></details>`;
}

function Earlier({ rollout, same }) {
  const [earlier, setEarlier] = useState(null);
  const show = async () => setEarlier(await all(rollout.path, same));
  if (earlier) return earlier.map((message, at) => html`<${Message} key=${`e${at}`} message=${message} earlier />`);
  return html`<button class="earlier" onClick=${show}>${many(same.messages, "message")} as in call ${same.call}: show</button>`;
}

async function all(path, same) {
  const detail = await askOnce("call", { path, call: same.call });
  const before = detail.same ? await all(path, detail.same) : [];
  return [...before, ...detail.messages, ...detail.replies.map((reply) => reply.message)].slice(0, same.messages);
}

function Message({ message, reply, finish, earlier }) {
  const reasoning = message.reasoning_content || message.reasoning;
  const calls = message.tool_calls || [];
  return html`<article class=${`message ${message.role} ${reply ? "reply" : ""} ${earlier ? "earlier" : ""}`}>
    <header><b>${reply || message.role}</b>${message.name && html` <span class="dim">${message.name}</span>`}${finish && html`<span class="tag">${finish}</span>`}</header>
    ${reasoning && html`<div class="reasoning"><small>reasoning</small><${Text} text=${textOf(reasoning)} /></div>`}
    <${Text} text=${textOf(message.content)} />
    ${calls.map((call) => html`<div class="tool-call"><small>tool call</small><code>${visible((call.function || call).name || "")}</code><${Text} text=${textOf((call.function || call).arguments)} /></div>`)}
  </article>`;
}

function Text({ text }) {
  const [open, setOpen] = useState(false);
  if (!text) return null;
  const long = text.length > CLIP && !open;
  return html`<div class="text" dir="auto">${visible(long ? text.slice(0, CLIP) : text)}</div>
    ${long && html`<button onClick=${() => setOpen(true)}>all ${count(text.length)} characters</button>`}`;
}

function Fold({ title, text, open }) {
  return html`<details class="fold" open=${open}><summary>${title}</summary><pre class="code" tabindex="0">${visible(text)}</pre></details>`;
}

function textOf(content) {
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  if (Array.isArray(content) && content.every((part) => part && typeof part.text === "string")) return content.map((part) => part.text).join("\n");
  return JSON.stringify(content, null, 2);
}

function short(value) {
  if (typeof value === "number" && !Number.isInteger(value)) return String(Number(value.toPrecision(6)));
  const text = typeof value === "string" ? value : JSON.stringify(value);
  return text && text.length > 200 ? `${text.slice(0, 200)}…` : text;
}

// Text in which nothing is invisible and nothing turns the reading direction around.
export function visible(text) {
  return String(text)
    .replace(/[\u0000-\u0008\u000b-\u001f]/g, (one) => String.fromCharCode(0x2400 + one.charCodeAt(0)))
    .replace(/\u007f/g, "␡")
    .replace(/[\u0080-\u009f\u200b\u200e\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff]/g, (one) => `⟨U+${one.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}
