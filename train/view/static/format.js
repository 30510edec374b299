// Numbers and times as people read them.

export function count(value) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en-US");
}

export function many(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

export function reward(value) {
  if (value === null || value === undefined) return "–";
  return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(3)));
}

export function signed(value) {
  if (value === null || value === undefined) return "";
  return `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`;
}

export function probability(logprob) {
  const chance = Math.exp(logprob) * 100;
  if (chance >= 99.995) return "100%";
  if (chance >= 10) return `${chance.toFixed(1)}%`;
  if (chance >= 0.01) return `${chance.toPrecision(2)}%`;
  return `${chance.toExponential(1)}%`;
}

export function logprob(value) {
  return value === 0 ? "0" : `−${Math.abs(value).toFixed(Math.abs(value) < 0.01 ? 5 : 3)}`;
}

export function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1000) return `${Math.round(value)} ms`;
  return seconds(value / 1000);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 60) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} min ${String(Math.round(value % 60)).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

export function time(text) {
  const at = text ? new Date(/[zZ]|[+-]\d\d:?\d\d$/.test(text) ? text : text.replace(" ", "T")) : null;
  return at && !Number.isNaN(at.getTime()) ? at : null;
}

// A token's text as one can read it out: quoted, with escapes.
export function quoted(text) {
  return JSON.stringify(text).replace(/[\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g, (one) =>
    `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);
}
