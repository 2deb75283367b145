/** A tool call in readable parts: a command, a diff, a file, a checklist, texts, and short values. */

import type { ToolCall } from "../api/answers";
import { pretty } from "../rollout/pretty";
import { type DiffLine, compareTexts, looksLikeDiff } from "./diff";
import { languageOfFile } from "./highlight.svelte";

export type CallPart =
  | { kind: "command"; text: string }
  | { kind: "diff"; name: string; lines: DiffLine[] }
  | { kind: "code"; name: string; text: string; language: string | null }
  | { kind: "text"; name: string; text: string } // may be Markdown
  | { kind: "checklist"; items: { text: string; state: "done" | "doing" | "open" }[] }
  | { kind: "values"; values: [string, string][] };

export interface ShownCall {
  about: string; // its subject on one line; may be ""
  parts: CallPart[];
  malformed: boolean; // the arguments are not a JSON object
}

type Fields = Record<string, unknown>;

const FILE_KEYS = ["file_path", "path", "filename", "notebook_path"];
const PROSE_KEYS = new Set(["prompt", "message", "description", "explanation", "thought", "text", "answer", "summary", "query", "plan"]);
const CODE_KEYS: Record<string, string> = { code: "python", sql: "sql", script: "bash" };
const SHELLS = /^(?:.*\/)?(?:ba|z|da)?sh$/;

function isFields(value: unknown): value is Fields {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** The arguments as an object, or null if they are not one. */
export function argumentFields(call: ToolCall): Fields | null {
  let value = call.arguments;
  if (typeof value === "string") {
    try {
      value = JSON.parse(value);
    } catch {
      return null;
    }
  }
  return value === null || value === undefined ? {} : isFields(value) ? value : null;
}

/** A command as typed: the script of `bash -lc`, or the words of a command. */
function commandText(value: unknown): string | null {
  if (typeof value === "string") return value;
  if (!Array.isArray(value) || !value.length || !value.every((word) => typeof word === "string")) return null;
  const words = value as string[];
  if (words.length === 3 && SHELLS.test(words[0] ?? "") && /^-[a-z]*c$/.test(words[1] ?? "")) return words[2] ?? "";
  return words.map((word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`)).join(" ");
}

function checklist(value: unknown): CallPart | null {
  if (!Array.isArray(value) || !value.length) return null;
  const items = value.map((item: unknown) => {
    if (!isFields(item)) return null;
    const text = item["content"] ?? item["step"] ?? item["title"], state = item["status"];
    if (typeof text !== "string" || typeof state !== "string") return null;
    return { text, state: /^(?:completed|done)$/.test(state) ? ("done" as const) : state === "in_progress" ? ("doing" as const) : ("open" as const) };
  });
  return items.every((item) => item !== null) ? { kind: "checklist", items } : null;
}

function replacement(fields: Fields, name: string): CallPart | null {
  const before = fields["old_string"] ?? fields["old_str"], after = fields["new_string"] ?? fields["new_str"];
  if (typeof before !== "string" || typeof after !== "string") return null;
  const lines = compareTexts(before, after);
  return lines ? { kind: "diff", name, lines } : null;
}

function fieldPart(name: string, value: string, language: string | null): CallPart {
  const code = CODE_KEYS[name] ?? (name === "content" || name === "file_text" || name === "new_source" ? language : null);
  if (looksLikeDiff(value)) return { kind: "code", name, text: value, language: "diff" };
  if (code || name === "content" || name === "file_text") return { kind: "code", name, text: value, language: code };
  return PROSE_KEYS.has(name) ? { kind: "text", name, text: value } : { kind: "code", name, text: value, language: null };
}

export function shownCall(call: ToolCall): ShownCall {
  const fields = argumentFields(call);
  if (fields === null) {
    const text = typeof call.arguments === "string" ? call.arguments : pretty(call.arguments);
    return { about: "", parts: [{ kind: "code", name: "", text, language: looksLikeDiff(text) ? "diff" : null }], malformed: true };
  }
  const rest = new Map(Object.entries(fields));
  const parts: CallPart[] = [];
  let about = "";
  const file = FILE_KEYS.find((key) => typeof fields[key] === "string");
  const language = file ? languageOfFile(String(fields[file])) : null;
  if (file) {
    about = String(fields[file]);
    rest.delete(file);
  }
  for (const key of ["command", "cmd"]) {
    const isEditor = key === "command" && file !== undefined; // an editor's sub-command, not a shell's
    const command = isEditor ? null : commandText(fields[key]);
    if (command === null) continue;
    parts.push(looksLikeDiff(command) ? { kind: "code", name: "", text: command, language: "diff" } : { kind: "command", text: command });
    rest.delete(key);
    if (typeof fields["description"] === "string") {
      about ||= fields["description"];
      rest.delete("description");
    }
  }
  const change = replacement(fields, "");
  if (change) {
    parts.push(change);
    for (const key of ["old_string", "new_string", "old_str", "new_str"]) rest.delete(key);
  }
  const edits = Array.isArray(fields["edits"]) ? fields["edits"].map((edit, index) => (isFields(edit) ? replacement(edit, `edit ${index + 1}`) : null)) : [];
  if (edits.length && edits.every((edit) => edit !== null)) {
    parts.push(...edits);
    rest.delete("edits");
  }
  for (const key of ["todos", "plan"]) {
    const list = checklist(fields[key]);
    if (!list) continue;
    parts.push(list);
    rest.delete(key);
  }
  if (!about && typeof fields["description"] === "string" && fields["description"].length <= 120 && rest.size > 1) {
    about = fields["description"];
    rest.delete("description");
  }
  const values: [string, string][] = [];
  for (const [name, value] of rest) {
    if (typeof value === "string" && (value.includes("\n") || value.length > 160)) parts.push(fieldPart(name, value, language));
    else if (typeof value === "object" && value !== null && JSON.stringify(value).length > 160) parts.push({ kind: "code", name, text: pretty(value), language: "json" });
    else values.push([name, typeof value === "string" ? value : pretty(value)]);
  }
  return { about, parts: values.length ? [{ kind: "values", values }, ...parts] : parts, malformed: false };
}

/** All text of a call, for a search. */
export function callText(call: ToolCall): string {
  const { about, parts } = shownCall(call);
  const texts = parts.map((part) => {
    if (part.kind === "diff") return part.lines.map((line) => line.text).join("\n");
    if (part.kind === "checklist") return part.items.map((item) => item.text).join("\n");
    return part.kind === "values" ? part.values.map((pair) => pair.join(" ")).join("\n") : part.text;
  });
  return [call.name, about, ...texts].join("\n");
}
