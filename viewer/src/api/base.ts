/** The path below which the page is served: "" at the root, "/x" behind a proxy that serves it below /x. */

import { isStatic } from "./embedded";

// The script is at the page's top path, for every address. A development server has a module instead of this script.
const script = document.currentScript instanceof HTMLScriptElement ? document.currentScript.src : "";
const BASE = isStatic || script === "" ? "" : new URL(".", script).pathname.replace(/\/$/, "");

/** A path of the server with the base path, as a browser requests it. */
export function served(path: string): string {
  return BASE + path;
}

/** An address's path without the base path. */
export function unserved(path: string): string {
  return path === BASE || path.startsWith(`${BASE}/`) ? path.slice(BASE.length) || "/" : path;
}
