/** The highlighter, loaded when code is first shown. Until then, or if it cannot be loaded, code is plain text. */

import { onDemand } from "../ondemand";

export interface CodeRun {
  text: string;
  kind: string; // the highlighter's name of the kind; "" for plain
}

export type Highlight = (code: string, language: string) => CodeRun[] | null;

const LONGEST = 60_000; // characters; longer code takes too long

let loaded = $state.raw<Highlight | null>(null);
let asked = false;

async function load(): Promise<void> {
  asked = true;
  loaded = (await onDemand<{ highlight: Highlight }>("highlighter"))?.highlight ?? null;
}

/** Code in colored runs, or null if it is not colored, or not yet. */
export function highlighted(code: string, language: string | null): CodeRun[] | null {
  if (language === null || code.length > LONGEST) return null;
  if (!asked) queueMicrotask(() => asked || void load());
  return loaded?.(code, language) ?? null;
}

/** Runs by line, without line breaks. */
export function runsByLine(runs: CodeRun[]): CodeRun[][] {
  const lines: CodeRun[][] = [[]];
  for (const run of runs) {
    run.text.split("\n").forEach((text, index) => {
      if (index > 0) lines.push([]);
      if (text) lines.at(-1)?.push({ text, kind: run.kind });
    });
  }
  return lines;
}

const BY_EXTENSION: Record<string, string> = {
  py: "python", pyi: "python", js: "javascript", mjs: "javascript", cjs: "javascript", jsx: "javascript", ts: "typescript", tsx: "typescript",
  sh: "bash", bash: "bash", zsh: "bash", c: "c", h: "c", cc: "cpp", cpp: "cpp", hpp: "cpp", cs: "csharp", css: "css", go: "go", ini: "ini",
  toml: "ini", cfg: "ini", java: "java", json: "json", jsonl: "json", kt: "kotlin", lua: "lua", php: "php", rb: "ruby", rs: "rust",
  sql: "sql", swift: "swift", html: "xml", xml: "xml", svg: "xml", svelte: "xml", vue: "xml", yaml: "yaml", yml: "yaml",
};

const BY_NAME: Record<string, string> = { dockerfile: "dockerfile", makefile: "makefile" };

/** The language of a file by its name, or null. */
export function languageOfFile(path: string): string | null {
  const name = (path.split("/").pop() ?? "").toLowerCase();
  return BY_NAME[name] ?? BY_EXTENSION[name.split(".").at(-1) ?? ""] ?? null;
}

/** The language of a fence, or null. */
export function languageOfFence(info: string): string | null {
  const name = (info.trim().split(/[\s{,]/)[0] ?? "").toLowerCase();
  if (!name) return null;
  return name === "shell" || name === "console" ? "bash" : (BY_EXTENSION[name] ?? name);
}
