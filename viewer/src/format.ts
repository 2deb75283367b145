/** Format numbers and times. */

import type { Num } from "./api/answers";

export const NONE = "–";

/** The value as a float, or null. */
export function float(value: Num): number | null {
  if (typeof value === "number") return value;
  if (value === null || value === undefined) return null;
  return value.$float === "nan" ? Number.NaN : value.$float === "inf" ? Number.POSITIVE_INFINITY : Number.NEGATIVE_INFINITY;
}

const grouped = new Intl.NumberFormat("en-US");
const WRITTEN_OUT = 7; // up to so many digits before the point, all are written

/** The first `digits` digits of a number, rounded half to even as in Python, and its power of ten. */
function decimals(x: number, digits: number): [string, number] {
  const [whole = "", power = ""] = Math.abs(x).toExponential(100).split("e");
  const all = whole.replace(".", "");
  const tie = /^50*$/.test(all.slice(digits)) && Number(all[digits - 1]) % 2 === 0;
  if (tie) return [all.slice(0, digits), Number(power)];
  const [rounded = "", after = ""] = Math.abs(x).toExponential(digits - 1).split("e");
  return [rounded.replace(".", ""), Number(after)];
}

/** A number with four significant digits, as on the command line (`number` of records/wording.py): 0.5, 12,346, 1.2e-05. */
export function number(value: Num, digits = 4): string {
  const x = float(value);
  if (x === null) return NONE;
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "nan" : x > 0 ? "inf" : "-inf";
  const sign = x < 0 || Object.is(x, -0) ? "-" : "";
  if (x === 0) return `${sign}0`;
  const [kept, power] = decimals(x, digits);
  if (power >= digits && power < WRITTEN_OUT) {
    const [all, places] = decimals(x, Math.floor(Math.log10(Math.abs(x))) + 1);
    return sign + grouped.format(Number(all) * 10 ** (places + 1 - all.length));
  }
  if (power < -4 || power >= digits) return `${sign}${Number(`${kept[0]}.${kept.slice(1)}`)}e${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
  return sign + String(Number(`${kept}e${power + 1 - kept.length}`));
}

/** A difference with its sign. The rounding error of equal numbers counts as 0. */
export function signed(value: Num): string {
  const x = float(value);
  if (x !== null && Math.abs(x) <= 1e-9) return "0";
  return x !== null && x > 0 ? `+${number(x)}` : number(x);
}

export function count(value: number | null | undefined): string {
  return value === null || value === undefined ? NONE : grouped.format(value);
}

/** A number of tokens; a dash if none are recorded, as for replies of text only. */
export function tokens(value: number | null | undefined): string {
  return value ? compact(value) : NONE;
}

/** 1234567 → 1.23 M; exact below ten thousand. */
export function compact(value: number | null | undefined): string {
  if (value === null || value === undefined) return NONE;
  if (Math.abs(value) < 10_000) return count(value);
  for (const [unit, name] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]] as const) {
    if (Math.abs(Number(value.toPrecision(3))) >= unit) return `${Number((value / unit).toPrecision(3))} ${name}`;
  }
  return count(value);
}

/** A share as on the command line, 12.5%; only exact values are written as 0% and 100%. */
export function percent(part: number, whole: number): string {
  if (!whole) return NONE;
  const share = (100 * part) / whole;
  if (share > 0 && share < 0.1) return "<0.1%";
  if (share < 100 && share > 99.9) return ">99.9%";
  const [kept, power] = decimals(share, Math.max(1, Math.floor(Math.log10(share || 1)) + 2));
  return `${Number(`${kept}e${power + 1 - kept.length}`).toFixed(1)}%`;
}

export function duration(nanoseconds: number | null): string {
  if (nanoseconds === null || nanoseconds < 0) return NONE;
  const seconds = nanoseconds / 1e9, whole = Math.round(seconds), minutes = Math.round(seconds / 60);
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(seconds < 9.995 ? 2 : 1)} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
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
