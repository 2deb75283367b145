/** A color for each fate: one hue trains, one family is masked, grays are dropped. */

import { fateFamily } from "../words";

export interface Share {
  fate: string;
  tokens: number;
  color: string;
}

const ORDER = { trained: 0, masked: 1, dropped: 2 };

/** The ledger in a steady order, each fate with its color. */
export function sharesOf(ledger: Record<string, number>): Share[] {
  const used = { masked: 0, dropped: 0 };
  return Object.entries(ledger)
    .filter(([, tokens]) => tokens > 0)
    .sort(([a, m], [b, n]) => ORDER[fateFamily(a)] - ORDER[fateFamily(b)] || n - m)
    .map(([fate, tokens]) => {
      const family = fateFamily(fate);
      if (family === "trained") return { fate, tokens, color: "var(--trained)" };
      used[family] += 1;
      return { fate, tokens, color: `var(--${family}-${Math.min(used[family], 3)})` };
    });
}
