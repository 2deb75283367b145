/** Large, seldom needed parts of the page: scripts beside this one, each loaded once on its first use. */

const own = document.currentScript instanceof HTMLScriptElement ? document.currentScript : null;
const loading = new Map<string, Promise<unknown>>();

/** The exports of `src/on-demand/NAME.ts`, or null if it cannot be loaded. */
export function onDemand<T>(name: string): Promise<T | null> {
  let found = loading.get(name);
  if (found === undefined) {
    found = load(name);
    loading.set(name, found);
  }
  return found as Promise<T | null>;
}

function load(name: string): Promise<unknown> {
  const script = document.createElement("script");
  script.src = new URL(`on-demand/${name}.js`, own?.src || document.baseURI).href;
  if (own?.nonce) script.nonce = own.nonce; // an exported page requires it for scripts
  return new Promise((resolve) => {
    script.onload = () => resolve((globalThis as Record<string, unknown>)[`rolltape_${name}`] ?? null);
    script.onerror = () => resolve(null);
    document.head.append(script);
  });
}
