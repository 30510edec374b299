// A break: two aligned windows, what differs marked, and in words why and what to change.
import { html } from "view/base.js";
import { count } from "view/format.js";

export function BreakCard({ one, onGo }) {
  const where = one.region === "sampled" ? `token ${count(one.offset)} of its reply` : `token ${count(one.offset)} of its prompt`;
  return html`<article class="break" id=${`break-${one.call}`} aria-label=${`Break at call ${one.call}`}>
    <header>
      <h3><span class="break-sign" aria-hidden="true">⟂</span> Call ${one.call} does not continue call ${one.before}</h3>
      <span class="tag sure-${one.sure}">${one.sure}</span>
    </header>
    <p class="cause">${sentence(one.cause_name)}. <span class="dim">From ${where} on (index ${count(one.index)} of the new prompt).</span></p>
    <div class="windows" tabindex="0" role="region" aria-label="Both windows, token by token">
      <table>
        <tbody>
          <tr><th scope="row">call ${one.before}<small>held</small></th>${cells(one, "held")}</tr>
          <tr><th scope="row">call ${one.call}<small>sent</small></th>${cells(one, "sent")}</tr>
        </tbody>
      </table>
    </div>
    <p><b>What to change</b> ${sentence(one.remedy)}.</p>
    <p class="dim">Exact all the same: ${count(one.exact_before)} sampled tokens in the sequence before, ${count(one.exact_after)} in the one after.</p>
    ${onGo && html`<p class="row">
      ${one.segment_before !== null && html`<button onClick=${() => onGo(`s${one.segment_before}`, "end")}>End of the sequence before</button>`}
      ${one.segment_after !== null && html`<button onClick=${() => onGo(`s${one.segment_after}`, one.index)}>Where the new one differs</button>`}
    </p>`}
  </article>`;
}

function cells(one, side) {
  return html`<td class="kept">${one.kept.length ? html`<span class="dots">…</span>` : ""}${one.kept.map(token)}</td>
    ${one.columns.map((column) => html`<td class=${column.same ? "same" : "differs"}>
      ${column[side].length ? column[side].map(token) : html`<span class="nothing" aria-label="nothing">∅</span>`}</td>`)}
    <td class="kept"><span class="dots">…</span></td>`;
}

export function token(one) {
  const parts = one.shown || [[one.text, 0]];
  const title = `id ${one.id}${one.text === null ? "" : ` ${JSON.stringify(one.text)}`}`;
  return html`<span class="w ${one.special ? "special" : ""}" title=${title}>${parts.map(([text, kind]) =>
    kind === 2 ? null : kind === 1 ? html`<i>${text}</i>` : text)}<small>${one.id}</small></span>`;
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
