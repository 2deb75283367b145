/** A value as readable JSON: short parts stay on one line. */

const ROOM = 56;

function setOut(value: unknown, indent: string): string {
  const line = JSON.stringify(value) ?? "null";
  if (typeof value !== "object" || value === null || line.length + indent.length <= ROOM) return spaced(value, line);
  const inner = `${indent}  `;
  if (Array.isArray(value)) return `[\n${value.map((item) => inner + setOut(item, inner)).join(",\n")}\n${indent}]`;
  const fields = Object.entries(value).map(([name, item]) => `${inner}${JSON.stringify(name)}: ${setOut(item, inner)}`);
  return fields.length ? `{\n${fields.join(",\n")}\n${indent}}` : "{}";
}

/** On one line, with a space after commas and colons. */
function spaced(value: unknown, line: string): string {
  if (Array.isArray(value)) return `[${value.map((item) => spaced(item, JSON.stringify(item) ?? "null")).join(", ")}]`;
  if (typeof value !== "object" || value === null) return line;
  const fields = Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${spaced(item, JSON.stringify(item) ?? "null")}`);
  return fields.length ? `{ ${fields.join(", ")} }` : "{}";
}

/** A value, or text that may be JSON, as readable text. */
export function pretty(value: unknown): string {
  if (typeof value !== "string") return value === undefined ? "" : setOut(value, "");
  if (value.length > 200_000 || !/^\s*[[{]/.test(value)) return value;
  try {
    return setOut(JSON.parse(value), "");
  } catch {
    return value;
  }
}

/** The readable content of a recorded message: its text, or the texts of its parts. */
export function contentText(content: unknown): string {
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return "";
  return content.map((part: unknown) => (typeof part === "string" ? part : String((part as { text?: unknown } | null)?.text ?? ""))).join("");
}
