/** Diffs: recorded ones, as unified diffs and as patches of an agent's tool, and diffs of two texts. */

export type LineKind = "add" | "del" | "same" | "hunk" | "file" | "none"; // none: not part of a diff

export interface DiffLine {
  kind: LineKind;
  text: string;
}

const HUNK = /^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@/;
const PATCH = /^\*\*\* (?:Begin Patch|End Patch|Add File: |Update File: |Delete File: |Move to: |End of File)/;
const MOST_LINES = 1500; // of a compared text, since the time grows with the square

export function looksLikeDiff(text: string): boolean {
  return /^(?:@@ -\d+(?:,\d+)? \+\d+(?:,\d+)? @@|\*\*\* Begin Patch\s*$)/m.test(text);
}

/** The lines of a text with diffs. A hunk has the length in its header; text after it is not part of it. */
export function diffLines(text: string): DiffLine[] {
  let before = 0, after = 0; // remaining lines of the hunk on each side
  let inPatch = false;
  return text.split("\n").map((line): DiffLine => {
    const hunk = HUNK.exec(line);
    if (hunk) {
      before = Number(hunk[1] ?? 1);
      after = Number(hunk[2] ?? 1);
      return { kind: "hunk", text: line };
    }
    if (before > 0 || after > 0) {
      if (line.startsWith("+")) return (after -= 1), { kind: "add", text: line };
      if (line.startsWith("-")) return (before -= 1), { kind: "del", text: line };
      if (line.startsWith("\\")) return { kind: "hunk", text: line };
      if (line === "" || line.startsWith(" ")) return (before -= 1), (after -= 1), { kind: "same", text: line };
      before = after = 0;
    }
    if (PATCH.test(line)) {
      inPatch = !line.startsWith("*** End Patch");
      return { kind: "file", text: line };
    }
    if (/^(?:diff --git |index [0-9a-f]+\.\.|--- |\+\+\+ |new file mode |deleted file mode |rename |similarity index )/.test(line)) return { kind: "file", text: line };
    if (inPatch) return { kind: line.startsWith("+") ? "add" : line.startsWith("-") ? "del" : line.startsWith("@@") ? "hunk" : "same", text: line };
    return { kind: "none", text: line };
  });
}

/** The changes between two texts by line, or null if they are too long to compare. */
export function compareTexts(before: string, after: string): DiffLine[] | null {
  const a = before === "" ? [] : before.split("\n"), b = after === "" ? [] : after.split("\n");
  let head = 0, tail = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head += 1;
  while (tail < a.length - head && tail < b.length - head && a[a.length - 1 - tail] === b[b.length - 1 - tail]) tail += 1;
  const x = a.slice(head, a.length - tail), y = b.slice(head, b.length - tail);
  if (x.length > MOST_LINES || y.length > MOST_LINES) return null;
  // common[i][j]: the length of the longest common subsequence of the lines from i and from j on
  const common = Array.from({ length: x.length + 1 }, () => new Uint16Array(y.length + 1));
  for (let i = x.length - 1; i >= 0; i--) {
    const row = common[i] as Uint16Array, next = common[i + 1] as Uint16Array;
    for (let j = y.length - 1; j >= 0; j--) row[j] = x[i] === y[j] ? (next[j + 1] ?? 0) + 1 : Math.max(next[j] ?? 0, row[j + 1] ?? 0);
  }
  const lines: DiffLine[] = a.slice(0, head).map((text) => ({ kind: "same", text: ` ${text}` }));
  let i = 0, j = 0;
  while (i < x.length || j < y.length) {
    if (i < x.length && j < y.length && x[i] === y[j]) lines.push({ kind: "same", text: ` ${x[i++]}` }), (j += 1);
    else if (j >= y.length || (i < x.length && (common[i + 1]?.[j] ?? 0) >= (common[i]?.[j + 1] ?? 0))) lines.push({ kind: "del", text: `-${x[i++]}` });
    else lines.push({ kind: "add", text: `+${y[j++]}` });
  }
  return [...lines, ...a.slice(a.length - tail).map((text): DiffLine => ({ kind: "same", text: ` ${text}` }))];
}
