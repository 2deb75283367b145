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
  sample: { id: string; index: number; reward: Num; advantage: Num; loss_weight: Num; trained?: number } | null;
  trainer?: { step: number; place: string; joined: boolean; records?: { step: number; place: string }[] } | null;
  missing: string[];
}

export type Column = Int32Array | Float32Array | Uint8Array | BigInt64Array;

const KINDS = { i4: Int32Array, f4: Float32Array, u1: Uint8Array, i8: BigInt64Array } as const;

const HIGH = /[^\x00-\x7f]/; // Windows-1252 spells no byte below 128 otherwise, and none above it as ASCII

export class TokenSheet {
  readonly n: number;
  readonly spans: Span[];
  readonly #columns = new Map<string, Column>();
  readonly #offsets: Int32Array;
  readonly #bytes: Uint8Array;
  readonly #byteText: string; // a character for each byte: right for what is ASCII, which most tokens are
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

  /** The value of a column at a token; NaN where there is none. */
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

  /** What a token spells; bytes that are no whole character as hexadecimal; its id where nobody knows. */
  text(token: number): string {
    if (!this.has("text_offsets")) return `[${this.value("ids", token)}]`;
    const start = this.#offsets[token] ?? 0, stop = this.#offsets[token + 1] ?? 0;
    const plain = this.#byteText.slice(start, stop);
    if (!HIGH.test(plain)) return plain;
    const bytes = this.#bytes.subarray(start, stop);
    try {
      return this.#strict.decode(bytes);
    } catch {
      return `⟨${[...bytes.subarray(0, 64)].map((byte) => byte.toString(16).toUpperCase().padStart(2, "0")).join(" ")}⟩`;
    }
  }

  /** The span in which a token lies. */
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
