/** Terminal colors in recorded output: SGR sequences, mapped to colors that are readable in both themes. */

export interface AnsiRun {
  text: string;
  color: string | null; // for CSS, with one value for each theme
  background: string | null;
  classes: string;
  control: boolean; // not a style sequence; `text` names it
}

type Rgb = [number, number, number];

interface Style {
  fg: Rgb | null;
  bg: Rgb | null;
  marks: Set<string>;
}

const BASIC: Rgb[] = [
  [40, 40, 40], [194, 54, 33], [37, 138, 36], [155, 115, 16], [40, 84, 196], [160, 50, 160], [20, 130, 145], [170, 170, 170],
  [110, 110, 110], [220, 60, 40], [45, 160, 45], [190, 140, 20], [70, 120, 230], [190, 70, 190], [30, 160, 175], [235, 235, 235],
];
const LIGHT: Rgb = [242, 240, 234], DARK: Rgb = [14, 13, 12]; // the backgrounds of code in both themes
const READABLE = 4.6; // contrast
const MARKS: Record<number, string> = { 1: "bold", 2: "faint", 3: "italic", 4: "underline", 7: "inverse", 9: "strike" };
const ENDS: Record<number, string[]> = { 22: ["bold", "faint"], 23: ["italic"], 24: ["underline"], 27: ["inverse"], 29: ["strike"] };
// CSI sequences, OSC sequences up to their end, and other sequences with ESC.
// eslint-disable-next-line no-control-regex
const SEQUENCE = /\x1b\[([0-?]*)([ -/]*)([@-~])|\x1b\]([^\x07\x1b]{0,2000})(?:\x07|\x1b\\)|\x1b[()][A-Z0-9]|\x1b[=>78cDEHMNOZ]/g;

export function hasAnsi(text: string): boolean {
  return text.includes("\x1b[") || text.includes("\x1b]");
}

function indexed(code: number): Rgb | null {
  if (code < 0 || code > 255) return null;
  if (code < 16) return BASIC[code] ?? null;
  if (code >= 232) return [8 + 10 * (code - 232), 8 + 10 * (code - 232), 8 + 10 * (code - 232)];
  const level = (at: number) => (at === 0 ? 0 : 55 + 40 * at);
  const at = code - 16;
  return [level(Math.floor(at / 36)), level(Math.floor(at / 6) % 6), level(at % 6)];
}

function luminance(color: Rgb): number {
  const [r, g, b] = color.map((value) => {
    const part = value / 255;
    return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  }) as Rgb;
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function contrast(a: Rgb, b: Rgb): number {
  const x = luminance(a), y = luminance(b);
  return (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
}

/** A color moved towards black or white until it is readable on another. */
function readableOn(color: Rgb, ground: Rgb): Rgb {
  const goal = luminance(ground) > 0.18 ? 0 : 255;
  let now = color;
  for (let step = 0; step < 20 && contrast(now, ground) < READABLE; step++) {
    now = now.map((value) => Math.round(value + (goal - value) * 0.14)) as Rgb;
  }
  return contrast(now, ground) < READABLE ? [goal, goal, goal] : now;
}

const css = (color: Rgb) => `rgb(${color.join(" ")})`;

function colorOf(style: Style): Pick<AnsiRun, "color" | "background"> {
  const inverse = style.marks.has("inverse");
  const fg = inverse ? style.bg : style.fg, bg = inverse ? style.fg : style.bg;
  if (bg) return { color: css(readableOn(fg ?? (luminance(bg) > 0.18 ? [0, 0, 0] : [255, 255, 255]), bg)), background: css(bg) };
  if (inverse) return { color: "var(--sunken)", background: "var(--ink)" };
  return { color: fg && `light-dark(${css(readableOn(fg, LIGHT))}, ${css(readableOn(fg, DARK))})`, background: null };
}

/** Change a style by the numbers of one sequence. */
function apply(style: Style, given: string): void {
  const codes = given.split(/[;:]/).map((part) => (part === "" ? 0 : Number(part)));
  for (let at = 0; at < codes.length; at++) {
    const code = codes[at] ?? 0;
    if (code === 0) (style.fg = style.bg = null), style.marks.clear();
    else if (MARKS[code]) style.marks.add(MARKS[code]);
    else if (ENDS[code]) for (const mark of ENDS[code]) style.marks.delete(mark);
    else if (code === 39) style.fg = null;
    else if (code === 49) style.bg = null;
    else if (code === 38 || code === 48) {
      const wide = codes[at + 1] === 2;
      const color = wide ? (codes.slice(at + 2, at + 5) as Rgb) : codes[at + 1] === 5 ? indexed(codes[at + 2] ?? -1) : null;
      at += wide ? 4 : 2;
      if (color && color.length === 3 && color.every((part) => part >= 0 && part <= 255)) style[code === 38 ? "fg" : "bg"] = color;
    } else if (code >= 30 && code <= 37) style.fg = indexed(code - 30);
    else if (code >= 90 && code <= 97) style.fg = indexed(code - 82);
    else if (code >= 40 && code <= 47) style.bg = indexed(code - 40);
    else if (code >= 100 && code <= 107) style.bg = indexed(code - 92);
  }
}

/** Output in runs of one style each. Other sequences are named, so that nothing is hidden. */
export function ansiRuns(text: string): AnsiRun[] {
  const runs: AnsiRun[] = [];
  const style: Style = { fg: null, bg: null, marks: new Set() };
  let from = 0;
  const put = (part: string) => {
    if (part) runs.push({ text: part, ...colorOf(style), classes: [...style.marks].filter((mark) => mark !== "inverse").join(" "), control: false });
  };
  for (const match of text.matchAll(SEQUENCE)) {
    put(text.slice(from, match.index));
    from = match.index + match[0].length;
    if (match[3] === "m" && !match[2] && /^[0-9;:]*$/.test(match[1] ?? "")) apply(style, match[1] ?? "");
    else runs.push({ text: match[0].replaceAll("\x1b", "ESC").replaceAll("\x07", "BEL"), color: null, background: null, classes: "", control: true });
  }
  put(text.slice(from));
  return runs;
}
