/** A search in a transcript, as a regular expression. */

import type { Message } from "../api/answers";
import { callText } from "./toolcalls";

export interface Matcher {
  asked: string; // as in the address
  pattern: RegExp; // global
}

const WORDS = /"([^"]*)"|(\S+)/g;
const UNSPACED = /[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]/; // scripts without spaces
const escape = (text: string) => text.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&");

/** One term of a search of the run as an expression: whole words with anything between them; null without words. */
function termPattern(text: string, beginning: boolean): string | null {
  const words = text.match(/[\p{L}\p{N}\p{Co}]+/gu);
  if (!words) return null;
  const [first = "", last = ""] = [words[0], words.at(-1)];
  const starts = UNSPACED.test(first[0] ?? "") ? "" : "(?<![\\p{L}\\p{N}\\p{Co}])";
  const ends = beginning || UNSPACED.test(last.at(-1) ?? "") ? "" : "(?![\\p{L}\\p{N}\\p{Co}])";
  return starts + words.map(escape).join("[^\\p{L}\\p{N}\\p{Co}]+") + ends;
}

/** The search in the address: `q` in the syntax of a search of the run, `find` literally. */
export function matcherOf(query: URLSearchParams): Matcher | null {
  const find = query.get("find"), q = query.get("q");
  if (find) return { asked: find, pattern: new RegExp(escape(find), "giu") };
  if (!q) return null;
  const terms = [...q.matchAll(WORDS)].map(([, phrase, word]) => termPattern(phrase ?? word ?? "", word?.endsWith("*") ?? false));
  const known = terms.filter((term): term is string => term !== null);
  return known.length ? { asked: q, pattern: new RegExp(known.join("|"), "giu") } : null;
}

export function occursIn(matcher: Matcher, text: string): boolean {
  return matcher.pattern.test(text) && ((matcher.pattern.lastIndex = 0), true);
}

/** Whether the text, thinking or calls of a message have a match. */
export function occursInMessage(matcher: Matcher, message: Message): boolean {
  return occursIn(matcher, [message.reasoning ?? "", message.text, ...(message.tool_calls ?? []).map(callText)].join("\n"));
}

/** The first match in a text at or after a place, or null. */
export function placeOf(matcher: Matcher, text: string, from = 0): { start: number; stop: number } | null {
  matcher.pattern.lastIndex = from;
  const match = matcher.pattern.exec(text);
  matcher.pattern.lastIndex = 0;
  return match ? { start: match.index, stop: match.index + match[0].length } : null;
}

const BLOCK = "p, li, td, th, pre, div, summary, button, dd, dt, h1, h2, h3, h4";

/** The matches in the shown text of an element. A match does not span blocks. */
export function rangesIn(element: Element, matcher: Matcher): Range[] {
  const ranges: Range[] = [];
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  let nodes: { node: Node; at: number }[] = [];
  let text = "", block: Element | null = null;
  const search = () => {
    for (const match of text.matchAll(matcher.pattern)) {
      const range = document.createRange();
      const stop = match.index + match[0].length;
      const first = nodes.findLast((one) => one.at <= match.index), last = nodes.findLast((one) => one.at < stop);
      if (!first || !last || !match[0]) continue;
      range.setStart(first.node, match.index - first.at);
      range.setEnd(last.node, stop - last.at);
      ranges.push(range);
    }
    (nodes = []), (text = "");
  };
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const own = node.parentElement?.closest(BLOCK) ?? null;
    if (own !== block) search();
    block = own;
    nodes.push({ node, at: text.length });
    text += node.textContent ?? "";
  }
  search();
  return ranges;
}
