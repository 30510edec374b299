// The lines of a token sequence: only those that are seen are in the page, whatever the sequence's length.
import { Band } from "view/band.js";
import { layOut, lineOf } from "view/layout.js";
import { logprob, probability, quoted } from "view/format.js";
import { CALL_COLORS, NONE } from "view/strip.js";

const LINE = 24;
const OVERSCAN = 12;
const BREAK = 2;

// The lines of a pane, made by hand: a frame's worth of work is the lines that came into sight.
export class PaneView {
  constructor(pane, field, map, strip, from, marked, tell) {
    Object.assign(this, { pane, field, strip, from, tell, marked });
    this.rows = new Map();
    this.active = null;
    this.hovered = null;
    this.told = new Set();
    this.drawn = false;
    this.color = "logprob";
    this.listeners = new AbortController();
    const on = (target, name, does, more) =>
      target.addEventListener(name, does, { signal: this.listeners.signal, ...more });
    // What is painted on a canvas does not follow the style sheet by itself.
    on(window, "theme", () => this.paint(this.color));
    on(matchMedia("(prefers-color-scheme: dark)"), "change", () => this.paint(this.color));
    on(pane, "scroll", () => this.later(), { passive: true });
    on(pane, "keydown", (event) => this.press(event));
    on(pane, "pointerover", (event) => this.hover(event));
    on(pane, "pointerleave", () => this.unhover());
    on(pane, "click", (event) => this.click(event));
    on(pane, "focus", () => this.focus());
    on(pane, "blur", () => this.blur());
    this.band = new Band(map, pane, strip, LINE, this.listeners.signal);
    this.sizes = new ResizeObserver(() => this.resize());
    this.sizes.observe(pane);
    this.resize();
  }

  end() {
    this.listeners.abort();
    this.sizes.disconnect();
    this.ended = true;
    this.tell.card(null);
    this.field.replaceChildren();
  }

  resize() {
    const cell = cellWidth(this.field);
    const style = getComputedStyle(this.field);
    const room = this.field.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    const columns = Math.max(16, Math.min(140, Math.floor(room / cell) - 1));
    if (columns === this.columns && this.pane.clientHeight === this.height) return;
    const top = this.lines ? this.lines.token[Math.floor(this.pane.scrollTop / LINE)] : null;
    if (columns !== this.columns) {
      this.columns = columns;
      this.lines = layOut(this.strip.widths, this.strip.index.lines, this.from, columns);
      this.field.style.height = `${this.lines.count * LINE + 48}px`;
      this.clear();
      if (top) this.pane.scrollTop = lineOf(this.lines, top) * LINE;
    }
    this.height = this.pane.clientHeight;
    this.draw();
    this.band.draw(this.lines, this.color);
  }

  clear() {
    this.rows.clear();
    this.field.replaceChildren();
  }

  paint(color) {
    this.color = color;
    this.band.draw(this.lines, color);
  }

  later() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => {
      this.asked = false;
      if (!this.ended) this.draw();
    });
  }

  draw() {
    const first = Math.max(0, Math.floor(this.pane.scrollTop / LINE) - OVERSCAN);
    const last = Math.min(this.lines.count - 1, Math.ceil((this.pane.scrollTop + this.pane.clientHeight) / LINE) + OVERSCAN);
    for (const [line, row] of this.rows) {
      if (line < first || line > last) {
        row.remove();
        this.rows.delete(line);
      }
    }
    const fresh = document.createDocumentFragment();
    for (let line = first; line <= last; line += 1) {
      const shown = this.rows.get(line);
      if (shown && !shown.waits) continue;
      const row = this.row(line);
      if (shown) shown.replaceWith(row);
      else fresh.append(row);
      this.rows.set(line, row);
    }
    this.field.append(fresh);
    this.mark();
    this.band.frame(this.lines);
  }

  row(line) {
    const { token, piece, skip, count: lines } = this.lines;
    const row = document.createElement("div");
    row.className = "line";
    row.setAttribute("role", "none");
    row.style.transform = `translateY(${line * LINE}px)`;
    const end = line + 1 < lines ? token[line + 1] : this.strip.widths.length - 1;
    const endPiece = line + 1 < lines ? piece[line + 1] : Infinity;
    const endSkip = line + 1 < lines ? skip[line + 1] : Infinity;
    const gutter = document.createElement("span");
    gutter.className = "gutter";
    gutter.setAttribute("aria-hidden", "true");
    row.append(gutter);
    let begun = null;
    for (let at = token[line]; at <= end; at += 1) {
      const fromPiece = at === token[line] ? piece[line] : 0;
      const fromSkip = at === token[line] ? skip[line] : 0;
      const toPiece = at === end ? endPiece : Infinity;
      const toSkip = at === end ? endSkip : Infinity;
      if (toPiece === 0 && toSkip === 0) continue; // the next line has all of it
      const one = this.strip.stretch(at);
      if (one && one.start === at && fromPiece === 0 && fromSkip === 0) begun = one;
      const slice = this.strip.slice(at, () => this.later());
      const span = slice ? this.span(at, slice, fromPiece, fromSkip, toPiece, toSkip) : this.placeholder(at);
      if (!slice) row.waits = true;
      if (span) row.append(span);
    }
    if (begun) {
      gutter.textContent = `call ${begun.call}`;
      gutter.className = "gutter begins";
    } else gutter.textContent = token[line].toLocaleString("en-US");
    const lead = this.strip.stretch(end > token[line] ? end - 1 : token[line]);
    gutter.dataset.call = lead ? String(lead.call % CALL_COLORS) : "";
    return row;
  }

  placeholder(at) {
    const span = document.createElement("span");
    span.className = "t waits";
    span.setAttribute("role", "option");
    span.setAttribute("aria-label", "loading");
    span.textContent = " ".repeat(Math.min(this.strip.widths[at], 12));
    return span;
  }

  span(at, slice, fromPiece, fromSkip, toPiece, toSkip) {
    const place = at - slice.from;
    const text = slice.texts[place];
    const parts = slice.shown[at] || [[text, 0]];
    const span = document.createElement("span");
    let piece = 0;
    let cells = 0;
    for (const [part, kind] of parts) {
      if (kind === BREAK) {
        piece += 1;
        cells = 0;
        continue;
      }
      if (piece < fromPiece || piece > toPiece || (piece === toPiece && toSkip === 0)) continue;
      const from = piece === fromPiece ? fromSkip - cells : 0;
      const to = piece === toPiece ? toSkip - cells : Infinity;
      cells += part.length;
      const told = from <= 0 && to >= part.length ? part : [...part].slice(Math.max(0, from), Math.max(0, to)).join("");
      if (!told) continue;
      if (kind === 0) span.append(told);
      else {
        const symbol = document.createElement("i");
        symbol.textContent = told;
        span.append(symbol);
      }
    }
    if (!span.firstChild) return null;
    const one = this.strip.stretch(at);
    const step = this.strip.steps[at];
    let name = "t";
    if (step !== NONE) name += ` p${step}`;
    if (this.strip.entropies && this.strip.entropies[at] !== NONE) name += ` e${this.strip.entropies[at]}`;
    name += one ? ` ${one.trained ? "trained" : "untrained"} k${one.call % CALL_COLORS}` : " context";
    if (slice.special.has(at)) name += " special";
    if (this.marked && this.marked(at)) name += " differs";
    span.className = name;
    span.id = `${this.strip.of}-${at}`;
    span.dataset.at = at;
    span.setAttribute("role", "option");
    span.setAttribute("aria-selected", "false");
    span.setAttribute("aria-label", spoken(slice, place, at, one));
    return span;
  }

  mark() {
    for (const old of this.field.querySelectorAll(".active")) {
      old.classList.remove("active");
      old.setAttribute("aria-selected", "false");
    }
    const span = this.active === null ? null : this.found(this.active);
    if (span) {
      span.classList.add("active");
      span.setAttribute("aria-selected", "true");
      this.pane.setAttribute("aria-activedescendant", span.id);
    } else this.pane.removeAttribute("aria-activedescendant");
    if (span && this.focused && this.hovered === null) this.showCard(this.active, span, true);
  }

  found(at) {
    return this.field.querySelector(`[data-at="${at}"]`);
  }

  goTo(at, tell = true) {
    const to = Math.max(this.from, Math.min(at, this.strip.widths.length - 1));
    this.active = to;
    const top = lineOf(this.lines, to) * LINE;
    if (top < this.pane.scrollTop || top + 2 * LINE > this.pane.scrollTop + this.pane.clientHeight) {
      this.pane.scrollTop = Math.max(0, top - this.pane.clientHeight / 3);
    }
    this.draw();
    if (!tell) return;
    this.told.add(to);
    this.tell.active(to);
  }

  // The token that the address names now. What was told from here comes back a moment later, when the reader may already
  // be further on: going back to it would be told again, and the two would chase each other for good.
  wished(at) {
    const own = this.told.has(at);
    if (at === this.active) this.told.clear();
    else if (!own) this.goTo(at, false);
  }

  press(event) {
    if (event.metaKey || event.ctrlKey || event.altKey) return;
    const at = this.active ?? this.from;
    const page = Math.max(1, Math.floor(this.pane.clientHeight / LINE) - 2);
    const line = lineOf(this.lines, at);
    const moves = {
      ArrowRight: () => at + (this.active === null ? 0 : 1),
      ArrowLeft: () => at - 1,
      ArrowDown: () => this.beside(line + 1, at),
      ArrowUp: () => this.beside(line - 1, at),
      PageDown: () => this.beside(line + page, at),
      PageUp: () => this.beside(line - page, at),
      Home: () => this.from,
      End: () => this.strip.widths.length - 1,
    };
    if (moves[event.key]) {
      event.preventDefault();
      this.hovered = null;
      this.goTo(moves[event.key]());
    } else if (event.key === "Escape") this.tell.card(null);
    else this.tell.key(event, at);
  }

  // The token of another line that stands about where `at` stands in its own.
  beside(line, at) {
    const own = this.found(at);
    const to = Math.max(0, Math.min(line, this.lines.count - 1));
    const x = own ? own.getBoundingClientRect().left + 2 : 0;
    const row = this.rows.get(to);
    let best = null;
    for (const span of row ? row.querySelectorAll("[data-at]") : []) {
      if (best === null || span.getBoundingClientRect().left <= x) best = span;
    }
    return best ? Number(best.dataset.at) : this.lines.token[to] + (this.lines.piece[to] ? 1 : 0);
  }

  hover(event) {
    const span = event.target.closest("[data-at]");
    if (!span || event.pointerType === "touch") return;
    this.hovered = Number(span.dataset.at);
    this.showCard(this.hovered, span, false);
  }

  unhover() {
    this.hovered = null;
    this.tell.card(null);
  }

  click(event) {
    const span = event.target.closest("[data-at]");
    if (!span) return;
    this.hovered = null;
    this.focused = true;
    this.goTo(Number(span.dataset.at));
  }

  focus() {
    this.focused = true;
    if (this.active === null && !this.pane.matches(":active")) {
      this.active = this.lines.token[Math.ceil(this.pane.scrollTop / LINE)] ?? this.from;
    }
    this.mark();
  }

  blur() {
    this.focused = false;
    this.tell.card(null);
  }

  showCard(at, span, pinned) {
    const token = this.strip.token(at, () => this.later());
    if (!token) return;
    const box = span.getBoundingClientRect();
    const pane = this.pane.getBoundingClientRect();
    if (box.bottom < pane.top || box.top > pane.bottom) return this.tell.card(null);
    const dock = pinned && pane.width > 720 ? pane : null;
    this.tell.card({ token, x: box.left, y: box.bottom + 6, above: box.top - 6, dock, pinned });
  }
}

function spoken(slice, place, at, one) {
  const text = slice.texts[place];
  const value = slice.logprobs[place];
  const said = text === null ? "no text" : quoted(text);
  const chance = value === null ? "" : `, probability ${probability(value)}, logprob ${logprob(value)}`;
  return `${said}, id ${slice.ids[place] ?? "not captured"}${chance}, ${one ? `call ${one.call}` : "context"}`;
}

let measured = null;
function cellWidth(field) {
  const probe = document.createElement("span");
  probe.className = "t probe";
  probe.textContent = "0".repeat(100);
  field.append(probe);
  measured = probe.getBoundingClientRect().width / 100;
  probe.remove();
  return measured || 8;
}
