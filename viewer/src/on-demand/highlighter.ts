/** Syntax highlighting, loaded when code is first shown: splits code into runs of text, each of one kind. */

import hljs from "highlight.js/lib/core";
import bash from "highlight.js/lib/languages/bash";
import c from "highlight.js/lib/languages/c";
import cpp from "highlight.js/lib/languages/cpp";
import csharp from "highlight.js/lib/languages/csharp";
import css from "highlight.js/lib/languages/css";
import dockerfile from "highlight.js/lib/languages/dockerfile";
import go from "highlight.js/lib/languages/go";
import ini from "highlight.js/lib/languages/ini";
import java from "highlight.js/lib/languages/java";
import javascript from "highlight.js/lib/languages/javascript";
import json from "highlight.js/lib/languages/json";
import kotlin from "highlight.js/lib/languages/kotlin";
import lua from "highlight.js/lib/languages/lua";
import makefile from "highlight.js/lib/languages/makefile";
import php from "highlight.js/lib/languages/php";
import python from "highlight.js/lib/languages/python";
import ruby from "highlight.js/lib/languages/ruby";
import rust from "highlight.js/lib/languages/rust";
import sql from "highlight.js/lib/languages/sql";
import swift from "highlight.js/lib/languages/swift";
import typescript from "highlight.js/lib/languages/typescript";
import xml from "highlight.js/lib/languages/xml";
import yaml from "highlight.js/lib/languages/yaml";
import type { CodeRun, Highlight } from "../transcript/highlight.svelte";

const LANGUAGES = {
  bash, c, cpp, csharp, css, dockerfile, go, ini, java, javascript, json, kotlin, lua, makefile, php, python, ruby, rust,
  sql, swift, typescript, xml, yaml,
};
for (const [name, language] of Object.entries(LANGUAGES)) hljs.registerLanguage(name, language);

const ENTITIES: Record<string, string> = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#x27;": "'" };
const PARTS = /<span class="([^"]*)">|<\/span>|([^<]+)/g;

/** Parse the highlighter's output, spans around escaped text. It never becomes HTML. */
function runsOf(html: string): CodeRun[] {
  const runs: CodeRun[] = [];
  const open: string[] = [];
  for (const [, kind, text] of html.matchAll(PARTS)) {
    if (text !== undefined) runs.push({ text: text.replace(/&(?:amp|lt|gt|quot|#x27);/g, (name) => ENTITIES[name] ?? name), kind: open.at(-1) ?? "" });
    else if (kind !== undefined) open.push((kind.split(" ")[0] ?? "").replace("hljs-", ""));
    else open.pop();
  }
  return runs;
}

export const highlight: Highlight = (code, language) =>
  hljs.getLanguage(language) ? runsOf(hljs.highlight(code, { language, ignoreIllegals: true }).value) : null;
