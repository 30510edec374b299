// Where data comes from: the server that sent this page, or the blocks inside a single file.

const embedded = document.getElementById("index");
export const inFile = embedded !== null;
const index = inFile ? JSON.parse(embedded.textContent) : null;
const blocks = new Map();
const answered = new Map();

// Asks `question` with `words`; throws an Error whose message is a sentence for people.
export async function ask(question, words = {}) {
  return inFile ? fromFile(question, words) : fromServer(question, words);
}

// The same, cached: for what does not change while it is looked at.
export function askOnce(question, words) {
  const key = addressOf(question, words);
  if (!answered.has(key)) {
    answered.set(key, ask(question, words));
    answered.get(key).catch(() => answered.delete(key));
    if (answered.size > 400) answered.delete(answered.keys().next().value);
  }
  return answered.get(key);
}

export function forget() {
  answered.clear();
}

async function fromServer(question, words) {
  let response;
  try {
    response = await fetch(`api/${addressOf(question, words)}`);
  } catch {
    throw new Error("The server does not answer: bench view has ended, or the connection is lost. Start it again.");
  }
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

async function fromFile(question, words) {
  if (question === "job") return index.job;
  if (question === "compare") return compareInFile(words);
  const place = index.where[words.path];
  if (place === undefined) throw new Error(index.left_out[words.path] || "This file does not hold that rollout.");
  if (!blocks.has(place)) blocks.set(place, unpack(document.getElementById(place).textContent));
  const part = (await blocks.get(place))[addressOf(question, { ...words, path: undefined })];
  if (part === undefined) throw new Error("This file does not hold that part: use bench view PATH for all of it.");
  if (part.error) throw new Error(part.error);
  return part;
}

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (one) => one.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

async function compareInFile({ a, b }) {
  const sides = await Promise.all([a, b].map((path) => fromFile("side", { path })));
  const [one, other] = sides.map((side) => side.ids);
  let common = 0;
  while (common < one.length && common < other.length && one[common] === other[common]) common += 1;
  const described = sides.map(({ ids, ...rest }) => ({ ...rest, tokens: ids.length }));
  return { common, same: common === one.length && common === other.length, sides: described };
}

function addressOf(question, words) {
  const given = Object.entries(words).filter(([, value]) => value !== undefined && value !== null);
  return given.length ? `${question}?${new URLSearchParams(given)}` : question;
}
