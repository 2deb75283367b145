/** Numbers and times as the page writes them. */

import type { Num } from "./api/answers";

export const NONE = "–";

/** The value as a float; null where there is none. */
export function float(value: Num): number | null {
  if (typeof value === "number") return value;
  if (value === null || value === undefined) return null;
  return value.$float === "nan" ? Number.NaN : value.$float === "inf" ? Number.POSITIVE_INFINITY : Number.NEGATIVE_INFINITY;
}

function odd(value: number): string {
  return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞";
}

function minus(text: string): string {
  return text.replace("-", "−");
}

/** A figure with `digits` places; very small and very large ones in powers of ten. */
export function figure(value: Num, digits = 3): string {
  const x = float(value);
  if (x === null) return NONE;
  if (!Number.isFinite(x)) return odd(x);
  const size = Math.abs(x);
  if (size !== 0 && (size < 0.5 * 10 ** -digits || size >= 1e6)) return minus(x.toExponential(2));
  return minus(x.toFixed(digits));
}

/** A figure without trailing zeros: rewards, edges of bins. */
export function short(value: Num, digits = 3): string {
  const x = float(value);
  if (x === null) return NONE;
  if (!Number.isFinite(x)) return odd(x);
  if (x !== 0 && Math.abs(x) < 0.5 * 10 ** -digits) return minus(x.toExponential(1));
  return minus(String(Number(x.toFixed(digits))));
}

/** Three figures that count, however small the value. */
export function significant(value: Num): string {
  const x = float(value);
  if (x === null || !Number.isFinite(x) || x === 0) return short(x);
  return Math.abs(x) < 1e-4 || Math.abs(x) >= 1e6 ? minus(x.toExponential(2)) : minus(String(Number(x.toPrecision(3))));
}

const grouped = new Intl.NumberFormat("en-US");

export function count(value: number | null | undefined): string {
  return value === null || value === undefined ? NONE : grouped.format(value);
}

/** How many tokens there are; a dash where none are recorded, as of replies that came as text alone. */
export function tokens(value: number | null | undefined): string {
  return value ? compact(value) : NONE;
}

/** 1234567 → 1.23 M; exact below ten thousand. */
export function compact(value: number | null | undefined): string {
  if (value === null || value === undefined) return NONE;
  if (Math.abs(value) < 10_000) return count(value);
  for (const [unit, name] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]] as const) {
    if (Math.abs(value) >= unit) return `${Number((value / unit).toPrecision(3))} ${name}`;
  }
  return count(value);
}

export function percent(part: number, whole: number): string {
  if (!whole) return NONE;
  const share = (100 * part) / whole;
  if (share > 0 && share < 0.1) return "<0.1 %";
  if (share < 100 && share > 99.9) return ">99.9 %";
  return `${share.toFixed(share < 10 || share > 90 ? 1 : 0).replace(/\.0$/, "")} %`;
}

export function duration(nanoseconds: number | null): string {
  if (nanoseconds === null || nanoseconds < 0) return NONE;
  const seconds = nanoseconds / 1e9;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

export function between(start: number | null, end: number | null): string {
  return start === null || end === null ? NONE : duration(end - start);
}

export function ago(nanoseconds: number | null | undefined, now: number = Date.now()): string {
  if (!nanoseconds) return NONE;
  const seconds = (now - nanoseconds / 1e6) / 1000;
  if (seconds < 5) return "now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 129_600) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86_400)} d ago`;
}

export function clock(nanoseconds: number | null | undefined): string {
  if (!nanoseconds) return NONE;
  const at = new Date(nanoseconds / 1e6);
  const two = (n: number) => String(n).padStart(2, "0");
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

export function characters(n: number): string {
  return n < 10_000 ? `${count(n)} characters` : `${compact(n)} characters`;
}
