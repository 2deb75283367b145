/** The current address: the path in the address bar, or the part after # in an exported page. */

import { served, unserved } from "./api/base";
import { isStatic, staticPage } from "./api/embedded";
import { type Query, tail } from "./query";

export type Place =
  | { view: "runs" }
  | { view: "comparison" } // of two runs
  | { view: "diff" } // of two rollouts
  | { view: "run"; r: string }
  | { view: "rollouts"; r: string }
  | { view: "tasks"; r: string }
  | { view: "group"; r: string; group: string }
  | { view: "rollout"; r: string; id: string; turn: string | null; message: string | null }
  | { view: "tokens"; r: string; id: string; sample: number | null; turn: string | null; token: number | null }
  | { view: "sample"; r: string; id: string; sample: string; token: number | null } // redirects to its tokens
  | { view: "compare"; r: string; id: string }
  | { view: "nowhere"; path: string };

function address(): { path: string; query: string } {
  if (!isStatic) return { path: unserved(location.pathname), query: location.search.slice(1) };
  const whole = location.hash.slice(1) || staticPage?.start || "/";
  const cut = whole.indexOf("?");
  return cut < 0 ? { path: whole, query: "" } : { path: whole.slice(0, cut), query: whole.slice(cut + 1) };
}

const here = $state(address());

function natural(text: string | undefined): number | null {
  return text !== undefined && /^\d+$/.test(text) ? Number(text) : null;
}

function decoded(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function placeOf(path: string): Place {
  const [r, kind, id, ...rest] = path.split("/").filter(Boolean).map(decoded);
  if (r === undefined) return { view: "runs" };
  if (kind === undefined && (r === "compare" || r === "diff")) return { view: r === "diff" ? "diff" : "comparison" };
  if (kind === undefined) return { view: "run", r };
  if (kind === "rollouts" && id === undefined) return { view: "rollouts", r };
  if (kind === "tasks" && id === undefined) return { view: "tasks", r };
  if (kind === "group" && id !== undefined && !rest.length) return { view: "group", r, group: id };
  if (kind === "compare" && id !== undefined && !rest.length) return { view: "compare", r, id };
  if (kind === "rollout" && id !== undefined) {
    const [what, which, ...more] = rest;
    if (what === undefined) return { view: "rollout", r, id, turn: null, message: null };
    if (what === "turn" && which !== undefined && !more.length) return { view: "rollout", r, id, turn: which, message: null };
    if (what === "turn" && which !== undefined && more[0] === "message" && more.length === 2) return { view: "rollout", r, id, turn: which, message: more[1] ?? null };
    if (what === "tokens" && which === "turn" && more[0] !== undefined) {
      return { view: "tokens", r, id, sample: null, turn: more[0], token: natural(more[1]) };
    }
    if (what === "tokens" && which === "sample" && more[0] !== undefined) {
      return { view: "sample", r, id, sample: more[0], token: natural(more[1]) };
    }
    if (what === "tokens" && natural(which ?? "0") !== null) {
      return { view: "tokens", r, id, sample: natural(which ?? "0"), turn: null, token: natural(more[0]) };
    }
  }
  return { view: "nowhere", path };
}

const place = $derived(placeOf(here.path));
const query = $derived(new URLSearchParams(here.query));

export const route = {
  get place(): Place {
    return place;
  },
  get path(): string {
    return here.path;
  },
  get query(): URLSearchParams {
    return query;
  },
};

function follow(): void {
  Object.assign(here, address());
}

addEventListener("popstate", (event) => {
  follow();
  void backTo((event.state as Left | null)?.top ?? 0);
});
addEventListener("hashchange", follow);

interface Left {
  top: number; // the scroll position when the page was left
}

// The browser restores the position before a view has its answer, and so at the top. An exported page has its answers.
if (!isStatic) {
  history.scrollRestoration = "manual";
  addEventListener("pagehide", leave);
}
void backTo((history.state as Left | null)?.top ?? 0);

function leave(): void {
  history.replaceState({ top: scrollY } satisfies Left, "");
}

/** Restore the scroll position as soon as the page is long enough again; gives up after a while. */
async function backTo(top: number): Promise<void> {
  const from = here.path;
  for (const until = performance.now() + 3000; top > 0 && performance.now() < until && here.path === from; ) {
    await new Promise(requestAnimationFrame);
    if (document.documentElement.scrollHeight - innerHeight < top) continue;
    scrollTo(0, top);
    return;
  }
}

/** The file of an exported page that shows a path: the one with the longest matching start. */
function fileOf(path: string): string | null {
  const bare = path.split("?")[0] ?? path;
  const starts = Object.keys(staticPage?.files ?? {}).filter((start) => bare === start || bare.startsWith(`${start}/`));
  const longest = starts.sort((a, b) => b.length - a.length)[0];
  return longest === undefined ? null : (staticPage?.files[longest] ?? null);
}

function thisFile(): string {
  return decoded(location.pathname.split("/").pop() ?? "");
}

/** The address of a path for a link. */
export function href(path: string): string {
  if (!isStatic) return served(path);
  const file = fileOf(path);
  return file === null || file === thisFile() ? `#${path}` : `${encodeURI(file)}#${path}`;
}

export function go(path: string, how: { replace?: boolean } = {}): void {
  const target = href(path);
  if (isStatic && !target.startsWith("#")) {
    location.href = target;
    return;
  }
  if (how.replace) history.replaceState(history.state, "", target);
  else {
    leave();
    history.pushState(null, "", target);
  }
  follow();
  if (!how.replace) scrollTo(0, 0);
}

/** Follow links inside the page without reloading it. */
export function followLinks(event: MouseEvent): void {
  if (event.defaultPrevented || event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  const link = (event.target as Element | null)?.closest("a");
  const to = link?.getAttribute("href");
  if (!link || !to || link.target || link.hasAttribute("download") || isStatic || !to.startsWith("/")) return;
  const path = unserved(to);
  if (path.startsWith("/api/")) return;
  event.preventDefault();
  go(path);
}

const part = encodeURIComponent;

/** One try of a rollout. */
export interface RolloutPlace {
  r: string;
  id: string;
  try: number | null; // null: the one that counts
}

/** The try that an address must name; null: there is one only. Without a name, the try that counts is shown. */
export function namedTry(row: { try: number; tries?: number }): number | null {
  return row.try || (row.tries ?? 1) > 1 ? row.try : null;
}

export function tryQuery(row: { try: number; tries?: number }): string {
  const named = namedTry(row);
  return named === null ? "" : `?try=${named}`;
}

function side(letter: "a" | "b", one: RolloutPlace): Record<string, string> {
  return { [letter]: one.r, [`${letter}_rollout`]: one.id, ...(one.try === null ? {} : { [`${letter}_try`]: String(one.try) }) };
}

export const paths = {
  comparison: (filter: Query) => `/compare${tail(filter)}`,
  diff: (a: RolloutPlace, b: RolloutPlace) => `/diff${tail({ ...side("a", a), ...side("b", b) })}`,
  run: (r: string) => `/${part(r)}`,
  rollouts: (r: string, filter: Query = {}) => `/${part(r)}/rollouts${tail(filter)}`,
  tasks: (r: string, filter: Query = {}) => `/${part(r)}/tasks${tail(filter)}`,
  group: (r: string, group: string) => `/${part(r)}/group/${part(group)}`,
  rollout: (r: string, id: string) => `/${part(r)}/rollout/${part(id)}`,
  turn: (r: string, id: string, turn: string) => `/${part(r)}/rollout/${part(id)}/turn/${part(turn)}`,
  message: (r: string, id: string, turn: string, digest: string) => `${paths.turn(r, id, turn)}/message/${part(digest)}`,
  tokens: (r: string, id: string, sample: number, token?: number) =>
    `/${part(r)}/rollout/${part(id)}/tokens/${sample}${token === undefined ? "" : `/${token}`}`,
  turnTokens: (r: string, id: string, turn: string, token?: number) =>
    `/${part(r)}/rollout/${part(id)}/tokens/turn/${part(turn)}${token === undefined ? "" : `/${token}`}`,
  /** By the sample's own id, which trainers use. */
  sampleTokens: (r: string, id: string, sample: string, token?: number) =>
    `/${part(r)}/rollout/${part(id)}/tokens/sample/${part(sample)}${token === undefined ? "" : `/${token}`}`,
  compare: (r: string, id: string) => `/${part(r)}/compare/${part(id)}`,
};
