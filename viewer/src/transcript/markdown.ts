/** Markdown as a tree that components draw. It never becomes HTML: tags stay text, addresses are never followed. */

import MarkdownIt, { type Token } from "markdown-it";

export interface MarkdownNode {
  kind: string; // an element's name, or "text", "code", "fence", "link", "image", "br"
  text: string; // of text, code and images
  info: string; // a fence's language, a link's or an image's address
  align: "left" | "center" | "right" | null;
  start: number | null; // of a numbered list
  children: MarkdownNode[];
}

const LONGEST = 120_000; // characters; longer text is shown as plain text
const parser = new MarkdownIt({ html: false, linkify: false, typographer: false, maxNesting: 24 });
// Addresses are only shown, so none needs to be refused, and the text stays unchanged.
parser.validateLink = () => true;
parser.normalizeLink = (address) => address;
parser.normalizeLinkText = (address) => address;

// Parts of lines that look different in Markdown.
const MARKED = /^ {0,3}(?:#{1,6} |[-*+] |\d{1,9}[.)] |> ?|```|~~~|\|)|^ {0,3}(?:[-*_] ?){3,}$|[*_`]\S|\]\(|\n\n| {2}\n/m;

/** Whether a text looks different as Markdown, and is short enough for it. */
export function isMarkdown(text: string): boolean {
  return text.length <= LONGEST && MARKED.test(text);
}

function node(kind: string, text = "", info = ""): MarkdownNode {
  return { kind, text, info, align: null, start: null, children: [] };
}

function leaf(token: Token): MarkdownNode | null {
  switch (token.type) {
    case "text":
    case "text_special":
    case "html_inline":
    case "html_block":
      return token.content ? node("text", token.content) : null;
    case "softbreak":
      return node("text", "\n");
    case "hardbreak":
      return node("br");
    case "code_inline":
      return node("code", token.content);
    case "fence":
    case "code_block":
      return node("fence", token.content.replace(/\n$/, ""), token.info);
    case "image":
      return node("image", token.content, String(token.attrGet("src") ?? ""));
    case "hr":
      return node("hr");
  }
  return token.content ? node("text", token.content) : null;
}

function opened(token: Token): MarkdownNode {
  const made = node(token.type === "link_open" ? "link" : token.tag);
  if (token.type === "link_open") made.info = String(token.attrGet("href") ?? "");
  if (token.tag === "ol") made.start = Number(token.attrGet("start") ?? 1);
  const align = /text-align:(left|center|right)/.exec(String(token.attrGet("style") ?? ""))?.[1];
  made.align = (align as MarkdownNode["align"] | undefined) ?? null;
  return made;
}

function grow(tokens: Token[], into: MarkdownNode[]): void {
  const path: MarkdownNode[][] = [into];
  for (const token of tokens) {
    const here = path.at(-1) ?? into;
    if (token.nesting === 1) {
      // A paragraph of a tight list is only its text.
      const made = token.hidden ? null : opened(token);
      if (made) here.push(made);
      path.push(made ? made.children : here);
    } else if (token.nesting === -1) path.pop();
    else if (token.type === "inline") grow(token.children ?? [], here);
    else {
      const made = leaf(token);
      const before = here.at(-1);
      if (made?.kind === "text" && before?.kind === "text") before.text += made.text;
      else if (made) here.push(made);
    }
  }
}

export function parseMarkdown(text: string): MarkdownNode[] {
  const nodes: MarkdownNode[] = [];
  grow(parser.parse(text, {}), nodes);
  return nodes;
}
