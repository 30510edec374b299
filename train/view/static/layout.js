// Lays tokens out in lines of `columns` cells from their widths alone: a token stays whole where it fits on a line.

const LISTED = 255;
const NEWLINE = 254;
const TWO_NEWLINES = 253;
const ONE_END = [1, 0];
const TWO_ENDS = [1, 1, 0];

export function bytesOf(text) {
  return text === null ? null : Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
}

// `{count, token, piece, skip}`: each line begins with token `token[n]`, the piece of it after its `piece[n]`th line
// end, `skip[n]` cells into that.
export function layOut(widths, listed, from, columns) {
  let room = 1024;
  let token = new Int32Array(room);
  let piece = new Int32Array(room);
  let skip = new Int32Array(room);
  let count = 0;
  function begin(at, part, cells) {
    if (count === room) {
      room *= 2;
      token = grown(token, room);
      piece = grown(piece, room);
      skip = grown(skip, room);
    }
    token[count] = at;
    piece[count] = part;
    skip[count] = cells;
    count += 1;
  }
  begin(from, 0, 0);
  let x = 0;
  for (let at = from; at < widths.length; at += 1) {
    const code = widths[at];
    if (code < TWO_NEWLINES && x + code <= columns) {
      x += code;
      continue;
    }
    const pieces = piecesOf(code, listed, at);
    for (let part = 0; part < pieces.length; part += 1) {
      let cells = pieces[part];
      if (part > 0) {
        begin(at, part, 0);
        x = 0;
      } else if (x > 0 && x + cells > columns) {
        begin(at, 0, 0);
        x = 0;
      }
      for (let taken = columns; cells > columns; taken += columns) {
        begin(at, part, taken);
        cells -= columns;
      }
      x += cells;
    }
  }
  return { count, token, piece, skip };
}

export function piecesOf(code, listed, at) {
  if (code === NEWLINE) return ONE_END;
  if (code === TWO_NEWLINES) return TWO_ENDS;
  return code === LISTED ? listed[at] : [code];
}

// The line that token `at` begins on.
export function lineOf(lines, at) {
  let low = 0;
  let high = lines.count - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    const before = lines.token[middle] < at ||
      (lines.token[middle] === at && lines.piece[middle] === 0 && lines.skip[middle] === 0);
    if (before) low = middle;
    else high = middle - 1;
  }
  return low;
}

function grown(array, room) {
  const larger = new Int32Array(room);
  larger.set(array);
  return larger;
}
