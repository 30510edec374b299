// Small charts, drawn as SVG: what the numbers of a table look like together.
import { html } from "view/base.js";
import { count, many, reward } from "view/format.js";

const WIDE = 320;
const HIGH = 96;

// Rewards a group: a dot a rollout, a line at the mean.
export function RewardChart({ groups, rows }) {
  const wanted = new Set(rows.map((row) => row.path));
  const shown = groups.map((group) => ({
    ...group,
    rewards: group.rewards.filter((value, at) => value !== null && wanted.has(group.members[at])),
  })).filter((group) => group.rewards.length);
  const all = shown.flatMap((group) => group.rewards);
  if (!all.length) return html`<${Figure} title="Rewards by group" text="no rewards yet" />`;
  const low = Math.min(0, ...all);
  const high = Math.max(1, ...all);
  const few = shown.slice(0, 40);
  const step = (WIDE - 20) / few.length;
  const y = (value) => HIGH - 14 - ((value - low) / (high - low || 1)) * (HIGH - 28);
  const mean = all.reduce((sum, value) => sum + value, 0) / all.length;
  const text = `${many(shown.length, "group")}, ${many(all.length, "reward")}, mean ${reward(mean)}`;
  return html`<${Figure} title="Rewards by group" text=${text}>
    <line class="axis" x1="16" x2=${WIDE} y1=${y(0)} y2=${y(0)} /><text class="tick" x="0" y=${y(0) + 4}>0</text>
    <line class="axis" x1="16" x2=${WIDE} y1=${y(1)} y2=${y(1)} /><text class="tick" x="0" y=${y(1) + 4}>1</text>
    ${few.map((group, at) => {
      const middle = 18 + step * (at + 0.5);
      const spots = spread(group.rewards, step);
      const average = group.rewards.reduce((sum, value) => sum + value, 0) / group.rewards.length;
      return html`<g><title>${group.id}: mean ${reward(average)} of ${group.rewards.length}</title>
        ${spots.map(([value, beside, rise]) => html`<circle class=${value >= 1 ? "good" : "bad"} cx=${middle + beside} cy=${y(value) - rise} r="3" />`)}
        <line class="mean" x1=${middle - Math.min(step * 0.42, 60)} x2=${middle + Math.min(step * 0.42, 60)} y1=${y(average)} y2=${y(average)} /></g>`;
    })}
  <//>`;
}

function spread(rewards, step) {
  const seen = new Map();
  const across = Math.max(1, Math.floor(Math.min(step * 0.8, 150) / 7));
  return rewards.map((value) => {
    const nth = seen.get(value) || 0;
    seen.set(value, nth + 1);
    const total = Math.min(across, rewards.filter((one) => one === value).length);
    return [value, ((nth % across) - (total - 1) / 2) * 7, Math.min(Math.floor(nth / across), 3) * 5];
  });
}

// Tokens a call: how many calls sampled how many tokens.
export function TokenChart({ rows }) {
  const values = rows.flatMap((row) => row.per_call || []);
  if (!values.length) return html`<${Figure} title="Tokens a call" text="no calls read yet" />`;
  const most = Math.max(...values, 1);
  const size = niceStep(most / 16);
  const bins = new Array(Math.floor(most / size) + 1).fill(0);
  for (const value of values) bins[Math.floor(value / size)] += 1;
  const tallest = Math.max(...bins);
  const step = (WIDE - 4) / bins.length;
  const ordered = [...values].sort((one, other) => one - other);
  const text = `${many(values.length, "call")}, median ${count(ordered[Math.floor(ordered.length / 2)])}, most ${count(most)}`;
  return html`<${Figure} title="Tokens a call" text=${text}>
    ${bins.map((number, at) => {
      const high = number ? Math.max(2, (number / tallest) * (HIGH - 24)) : 0;
      return html`<rect class="bar" x=${2 + at * step + 0.5} y=${HIGH - 16 - high} width=${Math.max(1, step - 1.5)} height=${high}>
        <title>${count(at * size)} to ${count((at + 1) * size - 1)} tokens: ${many(number, "call")}</title></rect>`;
    })}
    <line class="axis" x1="0" x2=${WIDE} y1=${HIGH - 16} y2=${HIGH - 16} />
    <text class="tick" x="0" y=${HIGH - 3}>0</text><text class="tick end" x=${WIDE} y=${HIGH - 3}>${count(bins.length * size)}</text>
  <//>`;
}

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(Math.max(rough, 1)));
  return Math.max(1, [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough) || 1);
}

// Coverage: how many rollouts are training-grade, and why the others are not.
export function CoverageChart({ rows }) {
  const kinds = [
    ["training-grade", "grade", rows.filter((row) => row.grade === true).length],
    ["exact in parts", "parts", rows.filter((row) => row.grade === false && row.threads > 0).length],
    ["not captured", "nothing", rows.filter((row) => row.grade === false && !row.threads).length],
    ["being read", "unread", rows.filter((row) => row.grade === undefined).length],
  ].filter(([, , number]) => number);
  const all = rows.length || 1;
  let at = 0;
  const text = kinds.map(([name, , number]) => `${count(number)} ${name}`).join(", ") || "no rollouts";
  return html`<${Figure} title="Coverage" text=${text}>
    ${kinds.map(([name, kind, number]) => {
      const wide = (number / all) * WIDE;
      const x = at;
      at += wide;
      return html`<rect class="cover ${kind}" x=${x} y="10" width=${Math.max(2, wide - 2)} height="22" rx="2"><title>${name}: ${number}</title></rect>`;
    })}
    ${kinds.map(([name, kind, number], place) => html`<g transform=${`translate(${(place % 2) * 160}, ${52 + Math.floor(place / 2) * 20})`}>
      <rect class="cover ${kind}" width="10" height="10" y="-9" rx="2" /><text class="key" x="16">${count(number)} ${name}</text></g>`)}
  <//>`;
}

function Figure({ title, text, children }) {
  return html`<figure class="chart"><figcaption><b>${title}</b> <span class="dim">${text}</span></figcaption>
    <svg preserveAspectRatio="xMinYMid" viewBox=${`0 0 ${WIDE} ${HIGH}`} role="img" aria-label=${`${title}: ${text}`}>${children}</svg></figure>`;
}
