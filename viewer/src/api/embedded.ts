/** The blocks of an exported page: `<script type="application/json" data-path="/api/…">`. */

interface Block {
  text: string;
  base64: boolean;
}

export interface StaticPage {
  start: string;
  home?: string; // the target of the name in the corner; by default the list of runs
  files: Record<string, string>; // first path of a file → the file
  masked?: number;
  name?: string;
}

const blocks = new Map<string, HTMLScriptElement>();
for (const element of document.querySelectorAll<HTMLScriptElement>("script[data-path]")) {
  if (element.dataset["path"]) blocks.set(element.dataset["path"], element);
}

// Answers differ by these parameters; an export ignores all others.
const TELLS_APART = /[?&](policy|left|right|step)=/;

export function embedded(path: string): Block | null {
  const element = blocks.get(path) ?? (TELLS_APART.test(path) ? undefined : blocks.get(path.split("?")[0] ?? path));
  return element ? { text: element.textContent ?? "", base64: element.dataset["base64"] !== undefined } : null;
}

const about = embedded("/static");
export const staticPage: StaticPage | null = about ? (JSON.parse(about.text) as StaticPage) : null;
export const isStatic = blocks.size > 0;
