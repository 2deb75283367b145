/** Two texts in pieces: common ones, and those of one text only. First by lines, then by words. */

import { common } from "./sequence";

export interface Piece {
  text: string;
  alike: boolean; // common to both texts
}

export type Sides = [Piece[], Piece[]];

const WORDS = /\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu;
const MOST_WORDS = 20_000; // characters of a range that is compared by words
const LEAST_ALIKE = 0.3; // of a range: with a smaller share, words that are equal by chance would only confuse

/** A text as lines, each with its line feed. */
function linesOf(text: string): string[] {
  return text.match(/[^\n]*\n|[^\n]+$/g) ?? [];
}

function add(pieces: Piece[], text: string, alike: boolean): void {
  if (!text) return;
  const last = pieces.at(-1);
  if (last?.alike === alike) last.text += text;
  else pieces.push({ text, alike });
}

/** Pieces of two sequences of texts; `between` gets the parts between two common places. */
function compared(a: string[], b: string[], between: (a: string[], b: string[], into: Sides) => void): Sides {
  const into: Sides = [[], []];
  let [i, j] = [0, 0];
  for (const [x, y] of [...common(a, b), [a.length, b.length] as const]) {
    if (x > i || y > j) between(a.slice(i, x), b.slice(j, y), into);
    if (x < a.length) {
      add(into[0], a[x] as string, true);
      add(into[1], b[y] as string, true);
    }
    [i, j] = [x + 1, y + 1];
  }
  return into;
}

function asAWhole(a: string[], b: string[], into: Sides): void {
  add(into[0], a.join(""), false);
  add(into[1], b.join(""), false);
}

function byWords(a: string[], b: string[], into: Sides): void {
  const [left, right] = [a.join(""), b.join("")];
  if (!left || !right || left.length + right.length > MOST_WORDS) return asAWhole(a, b, into);
  const found = compared(left.match(WORDS) ?? [], right.match(WORDS) ?? [], asAWhole);
  const alike = found[0].reduce((sum, piece) => sum + (piece.alike ? piece.text.trim().length : 0), 0);
  if (alike < LEAST_ALIKE * Math.min(left.length, right.length)) return asAWhole(a, b, into);
  for (const [index, pieces] of found.entries()) for (const piece of pieces) add(into[index] as Piece[], piece.text, piece.alike);
}

export function textSides(a: string, b: string): Sides {
  return compared(linesOf(a), linesOf(b), byWords);
}
