/** Queries of addresses: the parameters that choose what a view shows, and rows chosen by them in an exported page. */

export type Query = URLSearchParams | Record<string, string>;

/** The parameters that a view knows, in a fixed order, so that equal views have the same address. */
export function pick(query: URLSearchParams, names: readonly string[]): URLSearchParams {
  return new URLSearchParams(names.flatMap((name) => (query.get(name) ? [[name, query.get(name) ?? ""]] : [])));
}

/** The query with other values of some parameters. Those without a value are left out. */
export function changed(query: URLSearchParams, values: Record<string, string | null | undefined>): URLSearchParams {
  const next = new URLSearchParams(query);
  for (const [name, value] of Object.entries(values)) if (value) next.set(name, value); else next.delete(name);
  return next;
}

/** The end of an address: nothing if the query is empty. */
export function tail(query: Query): string {
  const text = new URLSearchParams(query).toString();
  return text ? `?${text}` : "";
}

/** Rows in the requested order, as on the server: those without a value last, equals with more attempts first. */
export function sorted<T>(rows: T[], keys: Record<string, (row: T) => number | string | null>, sort: string): T[] {
  const by = keys[sort.replace(/^-/, "")] ?? (() => null), attempts = keys["attempts"] ?? (() => 0);
  const sign = sort.startsWith("-") ? -1 : 1;
  return rows.sort((a, b) => {
    const x = by(a), y = by(b);
    if (x === null || y === null) return x === y ? 0 : x === null ? 1 : -1;
    return x < y ? -sign : x > y ? sign : Number(attempts(b)) - Number(attempts(a));
  });
}
