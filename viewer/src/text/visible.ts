/** Find characters that a reader cannot see, or that change the meaning of others. */

export interface Run {
  text: string;
  mark: string | null; // what the hidden character is; `text` is then its name
}

// Controls, soft hyphen, zero-width and directional characters, fillers, tags, lone surrogates. Not: tab, line feed.
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\u{1d173}-\u{1d17a}\u{e0000}-\u{e007f}]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/u;
const EMOJI = /\p{Extended_Pictographic}/u;

const NAMES: Record<number, string> = {
  0x00: "null", 0x07: "bell", 0x08: "backspace", 0x0d: "carriage return", 0x1b: "escape", 0xad: "soft hyphen",
  0x61c: "Arabic letter mark", 0x200b: "zero-width space", 0x200c: "zero-width non-joiner", 0x200d: "zero-width joiner",
  0x200e: "left-to-right mark", 0x200f: "right-to-left mark", 0x2028: "line separator", 0x2029: "paragraph separator",
  0x202a: "left-to-right embedding", 0x202b: "right-to-left embedding", 0x202c: "pop directional formatting",
  0x202d: "left-to-right override", 0x202e: "right-to-left override", 0x2060: "word joiner",
  0x2066: "left-to-right isolate", 0x2067: "right-to-left isolate", 0x2068: "first strong isolate",
  0x2069: "pop directional isolate", 0xfeff: "byte order mark",
};

function nameOf(point: number): string {
  if (point >= 0xd800 && point <= 0xdfff) return "half of a surrogate pair";
  if (point >= 0xe0000) return "tag character";
  return NAMES[point] ?? (point < 0xa0 ? "control character" : "invisible character");
}

function code(point: number): string {
  return `U+${point.toString(16).toUpperCase().padStart(4, "0")}`;
}

/** Whether a hidden character is harmless: a joiner inside an emoji, or a carriage return of a line break. */
function expected(text: string, at: number, point: number): boolean {
  if (point === 0x0d) return text[at + 1] === "\n";
  return point === 0x200d && EMOJI.test(text.slice(Math.max(0, at - 3), at)) && EMOJI.test(text.slice(at + 1, at + 3));
}

export function runsOf(text: string): Run[] {
  if (!HIDDEN.test(text)) return text ? [{ text, mark: null }] : [];
  const runs: Run[] = [];
  let from = 0;
  const every = new RegExp(HIDDEN.source, "gu");
  for (const match of text.matchAll(every)) {
    const point = match[0].codePointAt(0) ?? 0;
    if (expected(text, match.index, point)) continue;
    if (match.index > from) runs.push({ text: text.slice(from, match.index), mark: null });
    runs.push({ text: code(point), mark: nameOf(point) });
    from = match.index + match[0].length;
  }
  if (from < text.length) runs.push({ text: text.slice(from), mark: null });
  return runs;
}

const ENDLESS = /[^\s]{400}/;

/** Text in pieces between which a line may break, since a browser's time grows with the square of a word. */
export function pieces(text: string): string[] {
  return ENDLESS.test(text) ? (text.match(/\S{1,100}\s*|\s+/gu) ?? []) : [text];
}

/** On one line: for tokens and table cells. */
export function flat(text: string): string {
  return runsOf(text)
    .map((run) => (run.mark === null ? run.text : `⟨${run.text}⟩`))
    .join("");
}
