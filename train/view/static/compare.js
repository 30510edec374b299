// Two rollouts side by side, from the token where they part.
import { html, hooks, hrefOf } from "view/base.js";
import { ask } from "view/source.js";
import { COLORS, Legend, TokenPane } from "view/tokens.js";
import { Strip } from "view/strip.js";
import { Reward } from "view/jobs.js";
import { count, many, signed } from "view/format.js";

const { useEffect, useState } = hooks;
// Tokens shown before the one where they part.
const LEAD = 24;

export function Compare({ job, words, go }) {
  const [told, setTold] = useState(null);
  const [strips, setStrips] = useState([null, null]);
  const [trouble, setTrouble] = useState(null);
  const color = words.color || "logprob";
  useEffect(() => {
    let here = true;
    setTold(null);
    setTrouble(null);
    setStrips([null, null]);
    ask("compare", { a: words.a, b: words.b })
      .then(async (found) => {
        if (!here) return;
        setTold(found);
        const made = await Promise.all(found.sides.map((side) => (side.of ? Strip.of(side.path, side.of) : null)));
        if (here) setStrips(made);
      })
      .catch((error) => here && setTrouble(error.message));
    return () => { here = false; };
  }, [words.a, words.b]);
  if (trouble) return html`<main><p class="note bad">${trouble}</p></main>`;
  if (!told) return html`<main><p class="loading">Comparing…</p></main>`;
  const rows = new Map(job.rows.map((row) => [row.path, row]));
  const prompt = Math.max(...told.sides.map((side) => side.prompt));
  const both = strips.find(Boolean);
  return html`<main class="compare">
    <header class="head"><h1>Two rollouts</h1>
      <p class="parted">${sentenceOf(told, prompt)}</p></header>
    <div class="toolbar" role="toolbar" aria-label="Colors">
      <div class="segmented" role="radiogroup" aria-label="Color by">
        ${COLORS.map((one) => html`<button role="radio" aria-checked=${color === one.key} disabled=${one.key === "entropy" && !strips.some((strip) => strip && strip.entropies)}
          onClick=${() => go({ ...words, color: one.key }, { replace: true })}>${one.title}</button>`)}
      </div><span class="grow"></span>${both && html`<${Legend} color=${color} strip=${both} />`}
    </div>
    <div class="sides">
      ${told.sides.map((side, at) => {
        const row = rows.get(side.path) || {};
        const strip = strips[at];
        return html`<section class="side" aria-label=${side.name}>
          <header><h2><a href=${hrefOf({ view: "tokens", path: side.path, at: told.common < side.tokens ? told.common : undefined })}>${side.name}</a></h2>
            <span class=${`outcome ${side.outcome}`}>${side.outcome.replaceAll("_", " ")}</span>
            <span>reward <b><${Reward} value=${side.reward} /></b></span>
            ${row.advantage !== null && row.advantage !== undefined && html`<span class="num">advantage <b>${signed(row.advantage)}</b></span>`}
            <span class="dim num">${many(side.tokens, "token")}${strip ? `, ${count(strip.index.trained)} trained on` : ""}</span></header>
          ${!side.of && html`<p class="note warn">No token sequence: ${side.reason || "nothing was captured"}.</p>`}
          ${strip && html`<${TokenPane} strip=${strip} from=${fromOf(told, side)} at=${null} color=${color}
            marked=${(token) => token === told.common} label=${`Tokens of ${side.name} from where they part`} />`}
        </section>`;
      })}
    </div>
  </main>`;
}

function fromOf(told, side) {
  const from = Math.max(0, told.common - LEAD);
  return told.common > side.prompt ? Math.max(from, side.prompt) : Math.min(from, Math.max(0, side.tokens - 1));
}

function sentenceOf(told, prompt) {
  if (told.sides.some((side) => !side.of)) return "One of them has no token sequence, so there is nothing to compare.";
  if (told.same) return `Token for token the same: ${many(told.common, "token")}.`;
  if (told.common === prompt) return `The same prompt of ${many(prompt, "token")}; they part at the first sampled token.`;
  if (told.common > prompt) return `The same prompt and ${many(told.common - prompt, "same token")} after it; they part at token ${count(told.common)}.`;
  return `Their prompts differ from token ${count(told.common)} on.`;
}
