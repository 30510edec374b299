// The whole strip in a narrow band beside its lines: one row a pixel, the most surprising token of the lines there.
import { CALL_COLORS, NONE } from "view/strip.js";

// A line of a short strip takes so many pixels of the band.
const BAND_LINE = 5;

export class Band {
  // `element` holds a canvas and the frame that says what of the strip is seen; `line` is a line's height in the pane.
  constructor(element, pane, strip, line, signal) {
    Object.assign(this, { element, pane, strip, line, lines: null, scale: 1 });
    element.addEventListener("pointerdown", (event) => this.drag(event), { signal });
  }

  draw(lines, color) {
    this.lines = lines;
    const { element, strip } = this;
    const height = element.clientHeight;
    const width = element.clientWidth;
    if (!height || !width || !lines) return;
    const scale = window.devicePixelRatio || 1;
    const canvas = element.firstElementChild;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const brush = canvas.getContext("2d");
    const colors = colorsOf(this.pane, color);
    const per = Math.max(lines.count / canvas.height, 1 / (BAND_LINE * scale));
    this.scale = (per * canvas.height) / lines.count; // how many times the band is longer than what is in it
    for (let row = 0; row < canvas.height; row += 1) {
      const first = Math.floor(row * per);
      if (first >= lines.count) break;
      const last = Math.max(first, Math.min(lines.count - 1, Math.ceil((row + 1) * per) - 1));
      const to = last + 1 < lines.count ? lines.token[last + 1] : strip.widths.length;
      const found = strongest(strip, color, lines.token[first], Math.max(lines.token[first] + 1, to));
      brush.fillStyle = found === null ? colors.context : colors.steps[found];
      brush.fillRect(0, row, canvas.width, 1);
    }
    this.frame(lines);
  }

  // Where the pane is in the strip.
  frame(lines) {
    this.lines = lines;
    const { element, pane, line } = this;
    const whole = lines.count * line * this.scale;
    const style = element.lastElementChild.style;
    style.display = lines.count * line <= pane.clientHeight ? "none" : "block";
    style.top = `${(pane.scrollTop / whole) * 100}%`;
    style.height = `${Math.max(1.5, (pane.clientHeight / whole) * 100)}%`;
  }

  drag(event) {
    const go = (moved) => {
      const box = this.element.getBoundingClientRect();
      const share = ((moved.clientY - box.top) / box.height) * this.scale;
      this.pane.scrollTop = share * this.lines.count * this.line - this.pane.clientHeight / 2;
    };
    go(event);
    this.element.setPointerCapture(event.pointerId);
    const stop = new AbortController();
    this.element.addEventListener("pointermove", go, { signal: stop.signal });
    this.element.addEventListener("pointerup", () => stop.abort(), { once: true });
  }
}

function strongest(strip, color, from, to) {
  let found = null;
  for (let at = from; at < to; at += 1) {
    const one = strip.stretch(at);
    if (!one) continue;
    let value = null;
    if (color === "call") value = one.call % CALL_COLORS;
    else if (color === "mask") value = one.trained ? 0 : 1;
    else {
      const steps = color === "entropy" ? strip.entropies : strip.steps;
      value = steps && steps[at] !== NONE ? steps[at] : 0;
    }
    if (color === "call" || color === "mask") return value;
    if (found === null || value > found) found = value;
  }
  return found;
}

// The computed colors, for a canvas: a variable's own value is what it is in either theme.
function colorsOf(element, color) {
  const probe = element.appendChild(document.createElement("i"));
  const read = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };
  const names = {
    logprob: [0, 1, 2, 3, 4, 5, 6, 7].map((step) => `--p${step}`),
    entropy: [0, 1, 2, 3, 4, 5, 6, 7].map((step) => `--e${step}`),
    mask: ["--trained", "--untrained"],
    call: [0, 1, 2, 3, 4, 5].map((step) => `--k${step}`),
  };
  const found = { context: read("--map"), steps: names[color].map(read) };
  probe.remove();
  return found;
}
