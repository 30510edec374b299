// A token sequence as data: its index at once, its slices as they are looked at.
import { ask, askOnce } from "view/source.js";
import { bytesOf } from "view/layout.js";

const SLICE = 2048;
// No color: the token was not sampled, or has no logprob.
export const NONE = 255;
export const CALL_COLORS = 6;

// One strip, fetched: its index at once, its slices as they are looked at.
export class Strip {
  constructor(path, of, index) {
    this.path = path;
    this.of = of;
    this.index = index;
    this.widths = bytesOf(index.widths);
    this.steps = bytesOf(index.steps);
    this.entropies = bytesOf(index.entropies);
    this.stretches = index.stretches;
    this.slices = new Map();
    this.waiting = new Set();
    this.trouble = null;
  }

  static async of(path, of) {
    return new Strip(path, of, await askOnce("strip", { path, of }));
  }

  // The slice that token `at` is in, or null while it is on its way; `then` is called when it is here.
  slice(at, then) {
    const from = at - (at % SLICE);
    const loaded = this.slices.get(from);
    if (loaded) return loaded;
    if (!this.waiting.has(from)) {
      this.waiting.add(from);
      ask("slice", { path: this.path, of: this.of, from })
        .then((slice) => {
          slice.special = new Set(slice.special);
          this.slices.set(from, slice);
          if (this.slices.size > 64) this.slices.delete(this.slices.keys().next().value);
        }, (error) => { this.trouble = error.message; })
        .finally(() => { this.waiting.delete(from); then(); });
    }
    return null;
  }

  stretch(at) {
    let low = 0;
    let high = this.stretches.length - 1;
    while (low <= high) {
      const middle = (low + high) >> 1;
      const one = this.stretches[middle];
      if (at < one.start) high = middle - 1;
      else if (at >= one.start + one.length) low = middle + 1;
      else return one;
    }
    return null;
  }

  // Everything about one token that is here.
  token(at, then) {
    const slice = this.slice(at, then);
    if (!slice) return null;
    const place = at - slice.from;
    return {
      at,
      id: slice.ids[place],
      text: slice.texts[place],
      shown: slice.shown[at],
      logprob: slice.logprobs[place],
      entropy: slice.entropies[at],
      top: slice.top[at],
      special: slice.special.has(at),
      stretch: this.stretch(at),
    };
  }
}
