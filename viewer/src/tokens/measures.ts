/** The measures by which tokens can be colored, and the color classes of their values. */

import { type TermName, fateFamily } from "../words";
import type { TokenSheet } from "./decode";

export interface Measure {
  key: string;
  name: string;
  term?: TermName;
  about: string;
  kind: "more" | "around" | "kinds";
  needs: string;
  /** The badness of a token, by which "the worst" are found; larger is worse, NaN without a value. */
  badness: (sheet: TokenSheet, token: number) => number;
  /** The color's class: "" for none, h1…h6 of a ramp, b1…b3 below and a1…a3 above a middle, k0…k5, f-…. */
  tint: (sheet: TokenSheet, token: number) => string;
  value: (sheet: TokenSheet, token: number) => number;
  scale: string[]; // labels of the ramp's steps
  worst: string; // title of a list of the worst
  from: string; // meaning of the beginnings of the ramp's steps
}

function ramp(limits: number[]): (value: number) => string {
  return (value) => {
    if (Number.isNaN(value)) return "";
    let step = 0;
    while (step < limits.length && value >= (limits[step] ?? 0)) step += 1;
    return step ? `h${step}` : "";
  };
}

function around(limits: [number, number, number]): (value: number) => string {
  return (value) => {
    const size = Math.abs(value);
    if (Number.isNaN(value) || size < 1e-9) return "";
    const step = size >= limits[2] ? 3 : size >= limits[1] ? 2 : 1;
    return `${value < 0 ? "b" : "a"}${step}`;
  };
}

const column = (name: string) => (sheet: TokenSheet, token: number) => sheet.value(name, token);

function measure(
  key: string, name: string, about: string, needs: string, value: Measure["value"], tint: (value: number) => string,
  badness: (value: number) => number, scale: string[], worst: string, from: string, kind: Measure["kind"] = "more",
): Measure {
  const term = TERM[key];
  return { key, name, ...(term ? { term } : {}), about, kind, needs, value, scale, worst, from, tint: (sheet, token) => tint(value(sheet, token)), badness: (sheet, token) => badness(value(sheet, token)) };
}

const surprise = ramp([0.05, 0.3, 1, 2.3, 4.6, 7]);
const unlikely = ramp([0.05, 0.25, 0.63, 0.9, 0.99, 0.999]);
const figures = ramp([0.1, 0.4, 0.8, 1.4, 2.2, 3.2]);
const mismatch = ramp([1e-6, 1e-4, 1e-3, 1e-2, 0.1, 1]);
const same = (value: number) => value;

/** A lower bound of the entropy: that of the engine's most likely tokens, with all others as one more. */
function topEntropy(sheet: TokenSheet, token: number): number {
  const count = sheet.header.top ?? 0;
  let rest = 1, sum = 0, known = false;
  for (let at = token * count; at < (token + 1) * count; at++) {
    const logprob = sheet.value("top_logprobs", at);
    if (Number.isNaN(logprob)) continue;
    known = true;
    const probability = Math.exp(logprob);
    rest -= probability;
    if (probability > 0) sum -= probability * logprob;
  }
  return known ? sum - (rest > 1e-9 ? rest * Math.log(rest) : 0) : Number.NaN;
}

const TERM: Record<string, TermName> = { logprob: "logprob", probability: "probability", entropy: "entropy", top_entropy: "entropy", advantage: "advantage", ratio: "ratio", mismatch_kl: "mismatch KL" };

export const MEASURES: Measure[] = [
  measure("logprob", "Logprob", "of the sampled token, as the engine gave it", "logprob", column("logprob"), (x) => surprise(-x), (x) => -x, ["-0.05", "-0.3", "-1", "-2.3", "-4.6", "-7"], "least likely", "at most"),
  measure("probability", "Probability", "exp of the logprob", "logprob", (sheet, token) => Math.exp(sheet.value("logprob", token)), (x) => unlikely(1 - x), (x) => 1 - x, ["95%", "75%", "37%", "10%", "1%", "0.1%"], "least likely", "at most"),
  measure("entropy", "Entropy", "of the trainer's distribution, in nats", "entropy", column("entropy"), figures, same, ["0.1", "0.4", "0.8", "1.4", "2.2", "3.2"], "most uncertain", "at least"),
  measure("top_entropy", "Entropy, at least", "of the engine's most likely tokens, all others taken as one, in nats; the whole entropy is at least as large", "top_logprobs", topEntropy, figures, same, ["0.1", "0.4", "0.8", "1.4", "2.2", "3.2"], "most uncertain", "at least"),
  measure("advantage", "Advantage", "as the loss saw it", "advantage", column("advantage"), around([0, 0.5, 1.5]), Math.abs, ["-1.5", "-0.5", "0", "0", "0.5", "1.5"], "largest", "", "around"),
  measure("ratio", "Importance ratio", "trainer over inference probability", "log_ratio", column("ratio"), (x) => around([0, 0.1, 0.5])(Math.log(x)), (x) => Math.abs(Math.log(x)), ["0.61", "0.90", "1", "1", "1.11", "1.65"], "furthest from 1", "", "around"),
  measure("mismatch_kl", "Mismatch KL", "ratio - log ratio - 1", "mismatch_kl", column("mismatch_kl"), mismatch, same, ["1e-6", "1e-4", "1e-3", "0.01", "0.1", "1"], "largest mismatch", "at least"),
  {
    key: "version", name: "Weight version", term: "weight version", about: "which weights sampled the token", kind: "kinds", needs: "version", value: column("version"), scale: [], worst: "oldest", from: "",
    badness: (sheet, token) => { const at = sheet.value("version", token); return at < 0 ? Number.NaN : -at; },
    tint: (sheet, token) => { const at = sheet.value("version", token); return at < 0 || Number.isNaN(at) ? "" : `k${at % 6}`; },
  },
  {
    key: "trained", name: "Trained or masked", term: "fate", about: "what becomes of the token, and why", kind: "kinds", needs: "trained", value: column("trained"), scale: [], worst: "masked", from: "",
    badness: (sheet, token) => { const fate = fateOf(sheet, token); return fate === null || fate === "trained" ? Number.NaN : 1; },
    tint: (sheet, token) => { const fate = fateOf(sheet, token); return fate === null ? "" : fate.startsWith("loss:") ? "f-loss" : `f-${fateFamily(fate)}`; },
  },
  {
    key: "trainer_mask", name: "Trainer's mask", about: "which tokens the trainer trained, and where it and the tape disagree", kind: "kinds", needs: "trainer_trained", value: column("trainer_trained"), scale: [], worst: "disagreements", from: "",
    badness: (sheet, token) => (["f-more", "f-less"].includes(trainerTint(sheet, token)) ? 1 : Number.NaN),
    tint: trainerTint,
  },
];

/** Whether the trainer trained a token; null without a record, or if the record lacks the token. */
export function trainedByTrainer(sheet: TokenSheet, token: number): boolean | null {
  if (!sheet.has("trainer_trained") || token >= (sheet.header.trainer?.tokens ?? sheet.n)) return null;
  return sheet.value("trainer_trained", token) === 1;
}

function trainerTint(sheet: TokenSheet, token: number): string {
  const trained = trainedByTrainer(sheet, token), wanted = sheet.value("trained", token) === 1;
  if (trained === null) return "";
  if (trained === wanted) return trained ? "f-trained" : "";
  return trained ? "f-more" : "f-less";
}

/** A token's fate: by the policy, or masked by the loss; null on prompts and on context that trains elsewhere. */
export function fateOf(sheet: TokenSheet, token: number): string | null {
  if (sheet.value("trained", token) === 1) {
    if (sheet.value("masked_high", token) === 1) return "loss:masked_high";
    if (sheet.value("masked_low", token) === 1) return "loss:masked_low";
    if (sheet.value("masked", token) === 1) return "loss:masked";
    return "trained";
  }
  if (sheet.value("sampled", token) !== 1) return null;
  const fate = sheet.spanAt(token)?.fate ?? null;
  return fate === "trained" ? null : fate;
}

export function offered(sheet: TokenSheet): Measure[] {
  return MEASURES.filter((one) => sheet.has(one.needs) && (one.key !== "version" || sheet.header.versions.length > 0));
}

/** The tokens with the largest badness, worst first, ties in order. Only tokens with a color count. */
export function worstTokens(sheet: TokenSheet, by: Measure, most = 30): number[] {
  if (by.key === "version" && sheet.header.versions.length < 2) return [];
  const best: { token: number; bad: number }[] = [];
  let least = Number.NEGATIVE_INFINITY;
  for (let token = 0; token < sheet.n; token++) {
    const bad = by.badness(sheet, token);
    if (Number.isNaN(bad) || (best.length === most && bad <= least) || (by.kind !== "kinds" && bad <= 0) || (by.kind === "more" && by.tint(sheet, token) === "")) continue;
    let at = best.length;
    while (at > 0 && (best[at - 1]?.bad ?? 0) < bad) at -= 1;
    best.splice(at, 0, { token, bad });
    if (best.length > most) best.pop();
    least = best.at(-1)?.bad ?? least;
  }
  return best.map((one) => one.token);
}
