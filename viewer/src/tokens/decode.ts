/** The binary answer: header length, JSON header, then aligned little-endian columns. */

import { AnswerError } from "../api/client";
import type { Num } from "../api/answers";

export interface Span {
  start: number;
  stop: number;
  origin: string;
  turn: string;
  turn_sequence?: number;
  session?: string;
  role?: string | null;
  messages: [number, number] | null;
  fate: string | null;
}

export interface TokenHeader {
  n: number;
  columns: { name: string; dtype: "i4" | "f4" | "u1" | "i8"; offset: number; length: number }[];
  spans: Span[];
  versions: (string | [string, string])[];
  sample: { id: string; index: number; reward: Num; advantage: Num; loss_weight: Num; trained: number; logprob_kind?: string | null } | null;
  top?: number; // number of most likely tokens per place
  trainer?: { step: number; place: string; joined: boolean; tokens?: number; records?: { step: number; place: string }[] } | null;
  missing: string[];
}

export type Column = Int32Array | Float32Array | Uint8Array | BigInt64Array;

const KINDS = { i4: Int32Array, f4: Float32Array, u1: Uint8Array, i8: BigInt64Array } as const;

/** Bytes `first` to `last`, counted from 1, of the `of` bytes of a character. */
export interface CharacterPart {
  character: string;
  first: number;
  last: number;
  of: number;
}

export interface TopToken {
  id: number;
  text: string;
  logprob: number;
}

const PART = "⋯"; // for a token that ends inside a character; the completing token shows the character
const HIGH = /[^\x00-\x7f]/; // Windows-1252 spells no byte below 128 otherwise, and none above it as ASCII

function hexadecimal(bytes: Uint8Array): string {
  return `⟨${[...bytes].map((byte) => byte.toString(16).toUpperCase().padStart(2, "0")).join(" ")}⟩`;
}

/** "byte 2 of 3 of 🫠" */
export function partText({ character, first, last, of }: CharacterPart): string {
  return `${first === last ? `byte ${first}` : `bytes ${first} to ${last}`} of ${of} of ${character}`;
}

export class TokenSheet {
  readonly n: number;
  readonly spans: Span[];
  readonly #columns = new Map<string, Column>();
  readonly #offsets: Int32Array;
  readonly #bytes: Uint8Array;
  readonly #byteText: string; // one character per byte: correct for ASCII, as most tokens are
  readonly #strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

  constructor(readonly header: TokenHeader, buffer: ArrayBuffer, base: number) {
    this.n = header.n;
    this.spans = header.spans;
    for (const { name, dtype, offset, length } of header.columns) {
      this.#columns.set(name, new KINDS[dtype](buffer, base + offset, length));
    }
    this.#offsets = (this.#columns.get("text_offsets") as Int32Array | undefined) ?? new Int32Array(this.n + 1);
    this.#bytes = (this.#columns.get("text_utf8") as Uint8Array | undefined) ?? new Uint8Array();
    this.#byteText = new TextDecoder("latin1").decode(this.#bytes);
  }

  has(name: string): boolean {
    return this.#columns.has(name);
  }

  /** The value of a column at a token, or NaN. */
  value(name: string, token: number): number {
    const column = this.#columns.get(name);
    return column === undefined ? Number.NaN : Number(column[token] ?? Number.NaN);
  }

  floats(name: string): Float32Array | null {
    const column = this.#columns.get(name);
    return column instanceof Float32Array ? column : null;
  }

  flags(name: string): Uint8Array | null {
    const column = this.#columns.get(name);
    return column instanceof Uint8Array ? column : null;
  }

  ints(name: string): Int32Array | null {
    const column = this.#columns.get(name);
    return column instanceof Int32Array ? column : null;
  }

  /** The text of a token. A character of several tokens is shown with the last; invalid bytes in hexadecimal; the id without a tokenizer. */
  text(token: number): string {
    if (!this.has("text_offsets")) return `[${this.value("ids", token)}]`;
    const start = this.#offsets[token] ?? 0, stop = this.#offsets[token + 1] ?? 0;
    const plain = this.#byteText.slice(start, stop);
    if (!HIGH.test(plain)) return plain;
    const [first, last] = [this.#characterAround(start), this.#characterAround(stop - 1)];
    if (first && last) {
      const whole = this.#decoded(first[0], last[1] > stop ? last[0] : stop);
      if (whole !== null) return whole || PART;
    }
    return hexadecimal(this.#bytes.subarray(start, Math.min(stop, start + 64)));
  }

  /** The characters of which a token has only some of the bytes. */
  parts(token: number): CharacterPart[] {
    const start = this.#offsets[token] ?? 0, stop = this.#offsets[token + 1] ?? 0;
    if (start === stop || !HIGH.test(this.#byteText.slice(start, stop))) return [];
    const found: CharacterPart[] = [];
    for (const place of [this.#characterAround(start), this.#characterAround(stop - 1)]) {
      if (place === null || (place[0] >= start && place[1] <= stop) || (found.length && place[0] < start)) continue;
      const [from, to] = place;
      found.push({ character: this.#decoded(from, to) ?? "", first: Math.max(start, from) - from + 1, last: Math.min(stop, to) - from, of: to - from });
    }
    return found;
  }

  /** A token for a list: its text, or its part of a character. */
  label(token: number): string {
    const text = this.text(token);
    const part = text === PART ? this.parts(token)[0] : undefined;
    return part === undefined ? text : partText(part);
  }

  /** The beginning and end of the character of a byte, or null. */
  #characterAround(place: number): [number, number] | null {
    let from = place;
    while (from > place - 3 && from > 0 && ((this.#bytes[from] ?? 0) & 0xc0) === 0x80) from -= 1;
    const lead = this.#bytes[from] ?? 0;
    const to = from + (lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4);
    return to > place && this.#decoded(from, to) !== null ? [from, to] : null;
  }

  #decoded(from: number, to: number): string | null {
    try {
      return this.#strict.decode(this.#bytes.subarray(from, to));
    } catch {
      return null;
    }
  }

  /** The most likely tokens at a place, best first, from the engine. */
  top(token: number): TopToken[] {
    const count = this.header.top ?? 0;
    const found: TopToken[] = [];
    for (let at = token * count; at < (token + 1) * count; at++) {
      const id = this.value("top_ids", at);
      if (id >= 0) found.push({ id, text: this.#topText(id), logprob: this.value("top_logprobs", at) });
    }
    return found;
  }

  #topText(id: number): string {
    const known = this.ints("top_known"), offsets = this.ints("top_text_offsets"), bytes = this.flags("top_text_utf8");
    if (known === null || offsets === null || bytes === null) return `[${id}]`;
    let low = 0, high = known.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if ((known[middle] ?? 0) < id) low = middle + 1;
      else high = middle;
    }
    const own = bytes.subarray(offsets[low], offsets[low + 1]);
    try {
      return this.#strict.decode(own);
    } catch {
      return hexadecimal(own);
    }
  }

  /** The span of a token. */
  spanAt(token: number): Span | null {
    let low = 0, high = this.spans.length - 1;
    while (low <= high) {
      const middle = (low + high) >> 1;
      const span = this.spans[middle] as Span;
      if (token < span.start) high = middle - 1;
      else if (token >= span.stop) low = middle + 1;
      else return span;
    }
    return null;
  }

  version(index: number): string | null {
    const version = this.header.versions[index];
    if (version === undefined) return null;
    if (typeof version === "string") return version;
    return version[0] === version[1] ? version[0] : `${version[0]} to ${version[1]}`;
  }
}

export function decodeTokens(buffer: ArrayBuffer): TokenSheet {
  if (buffer.byteLength < 8) throw new AnswerError("the answer holds no tokens", 500);
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length))) as TokenHeader;
  return new TokenSheet(header, buffer, Math.ceil((8 + length) / 8) * 8);
}
