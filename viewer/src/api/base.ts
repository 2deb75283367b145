/** The path below which the page is served: "" at the root, "/x" behind a proxy that serves it there. */

import { isStatic } from "./embedded";

// The script lies at the top of the page, whatever the address; a development server has a module, and no such script.
const script = document.currentScript instanceof HTMLScriptElement ? document.currentScript.src : "";
const BASE = isStatic || script === "" ? "" : new URL(".", script).pathname.replace(/\/$/, "");

/** A path of the server as a browser asks for it. */
export function served(path: string): string {
  return BASE + path;
}

/** An address's path as the page knows it. */
export function unserved(path: string): string {
  return path === BASE || path.startsWith(`${BASE}/`) ? path.slice(BASE.length) || "/" : path;
}
