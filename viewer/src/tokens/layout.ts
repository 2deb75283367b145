/** Lay out tokens in lines of equal height, so that any range of lines can be drawn separately. */

import { runsOf } from "../text/visible";
import type { Span, TokenSheet } from "./decode";

export const LINE = 24; // the height of a line, in pixels

export interface SheetLine {
  head: number; // index of the span that begins here, whose title the line shows, or -1
  first: number; // pieces [first, last)
  last: number;
}

export interface Layout {
  lines: SheetLine[];
  token: Int32Array; // of each piece
  from: Int32Array; // characters [from, to) of the token's shown text
  to: Int32Array;
  lineOf: Int32Array; // for each token: the line in which it begins
}

/** The shown text of a token: line breaks and hidden characters have symbols. */
export function shownText(text: string): string {
  if (/^[\x20-\x7e]*$/.test(text)) return text || "∅";
  return runsOf(text)
    .map((run) => (run.mark === null ? run.text : `⟨${run.text}⟩`))
    .join("")
    .replaceAll("\r", "␍")
    .replaceAll("\n", "⏎\n")
    .replaceAll("\t", "→\t") || "∅";
}

type Width = (text: string) => number;

/** Widths in columns of the fixed-width font; texts with other characters are measured once each. */
export function widths(context: CanvasRenderingContext2D, cell: number): Width {
  const known = new Map<string, number>();
  return (text) => {
    if (/^[\x20-\x7e]*$/.test(text)) return text.length;
    let width = known.get(text);
    if (width === undefined) {
      width = context.measureText(text.replaceAll("\n", "")).width / cell;
      known.set(text, width);
    }
    return width;
  };
}

export function layOut(sheet: TokenSheet, columns: number, width: Width): Layout {
  const room = Math.max(8, columns);
  const lines: SheetLine[] = [];
  const token: number[] = [], from: number[] = [], to: number[] = [];
  const lineOf = new Int32Array(sheet.n);
  let used = 0, first = 0;

  const endLine = () => {
    if (token.length > first) lines.push({ head: -1, first, last: token.length });
    first = token.length;
    used = 0;
  };
  const put = (at: number, start: number, stop: number, wide: number) => {
    token.push(at);
    from.push(start);
    to.push(stop);
    used += wide;
  };

  const spans: Span[] = sheet.spans.length ? sheet.spans : [{ start: 0, stop: sheet.n, origin: "", turn: "", messages: null, fate: null }];
  spans.forEach((span, index) => {
    endLine();
    lines.push({ head: index, first, last: first });
    for (let at = span.start; at < Math.min(span.stop, sheet.n); at++) {
      const text = shownText(sheet.text(at));
      const wide = width(text);
      if (used > 0 && used + wide > room) endLine();
      lineOf[at] = lines.length;
      if (wide <= room && !text.includes("\n")) {
        put(at, 0, text.length, wide);
        continue;
      }
      // A token with line breaks inside, or one longer than a line.
      for (let start = 0; start < text.length; ) {
        const end = text.indexOf("\n", start);
        const stop = Math.min(start + Math.max(1, Math.floor(room - used)), end < 0 ? text.length : end);
        put(at, start, stop, width(text.slice(start, stop)));
        start = stop;
        if (text[start] === "\n") {
          start += 1;
          endLine();
        } else if (start < text.length) endLine();
      }
    }
  });
  endLine();
  return { lines, lineOf, token: Int32Array.from(token), from: Int32Array.from(from), to: Int32Array.from(to) };
}
