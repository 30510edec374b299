// A break: two aligned windows, what differs marked, and in words why and what to change.
import { html } from "view/base.js";
import { count } from "view/format.js";

export function BreakCard({ found, onGo }) {
  const where = found.region === "sampled" ? `token ${count(found.offset)} of its reply` : `token ${count(found.offset)} of its prompt`;
  return html`<article class="break" id=${`break-${found.call}`} aria-label=${`Break at call ${found.call}`}>
    <header>
      <h3><span class="break-sign" aria-hidden="true">⟂</span> Call ${found.call} does not continue call ${found.before}</h3>
      <span class="tag sure-${found.sure}">${found.sure}</span>
    </header>
    <p class="cause">${sentence(found.cause_name)}. <span class="dim">From ${where} on (index ${count(found.index)} of the new prompt).</span></p>
    <div class="windows" tabindex="0" role="region" aria-label="Both windows, token by token">
      <table>
        <tbody>
          <tr><th scope="row">call ${found.before}<small>expected</small></th>${cells(found, "expected")}</tr>
          <tr><th scope="row">call ${found.call}<small>sent</small></th>${cells(found, "sent")}</tr>
        </tbody>
      </table>
    </div>
    <p><b>What to change</b> ${sentence(found.remedy)}.</p>
    <p class="dim">Exact all the same: ${count(found.exact_before)} sampled tokens in the sequence before, ${count(found.exact_after)} in the next.</p>
    ${onGo && html`<p class="row">
      ${found.segment_before !== null && html`<button onClick=${() => onGo(`s${found.segment_before}`, "end")}>End of the sequence before</button>`}
      ${found.segment_after !== null && html`<button onClick=${() => onGo(`s${found.segment_after}`, found.index)}>Where the new sequence differs</button>`}
    </p>`}
  </article>`;
}

function cells(found, side) {
  return html`<td class="shared">${found.shared.length ? html`<span class="dots">…</span>` : ""}${found.shared.map(token)}</td>
    ${found.columns.map((column) => html`<td class=${column.same ? "same" : "differs"}>
      ${column[side].length ? column[side].map(token) : html`<span class="nothing" aria-label="nothing">∅</span>`}</td>`)}
    <td class="shared"><span class="dots">…</span></td>`;
}

export function token(entry) {
  const parts = entry.shown || [[entry.text, 0]];
  const title = `id ${entry.id}${entry.text === null ? "" : ` ${JSON.stringify(entry.text)}`}`;
  return html`<span class="w ${entry.special ? "special" : ""}" title=${title}>${parts.map(([text, kind]) =>
    kind === 2 ? null : kind === 1 ? html`<i>${text}</i>` : text)}<small>${entry.id}</small></span>`;
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
