/** Answers by path: from the server, or from the blocks of an exported page. */

import { served } from "./base";
import { embedded, isStatic } from "./embedded";
import { noteRequest } from "./live.svelte";

export class AnswerError extends Error {
  constructor(
    message: string,
    readonly status: number,
    readonly where: string | null = null,
  ) {
    super(message);
  }
}

async function failure(response: Response): Promise<AnswerError> {
  const body: unknown = await response.json().catch(() => null);
  const error = (body as { error?: { message?: unknown; where?: unknown } } | null)?.error;
  const message = typeof error?.message === "string" ? error.message : `the server answered ${response.status}`;
  return new AnswerError(message, response.status, typeof error?.where === "string" ? error.where : null);
}

async function respond(path: string, signal?: AbortSignal, more: RequestInit = {}): Promise<Response> {
  let response: Response;
  try {
    response = await fetch(served(path), { signal: signal ?? null, headers: { Accept: "application/json" }, ...more });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new AnswerError("the server does not answer; is `rolltape view` still running?", 0);
  }
  if (!response.ok) throw await failure(response);
  return response;
}

function notExported(path: string): AnswerError {
  return new AnswerError("not part of this export", 404, path);
}

export async function json<T>(path: string, signal?: AbortSignal): Promise<T> {
  if (!isStatic) {
    const noteAnswer = noteRequest(path);
    const answer = (await (await respond(path, signal)).json()) as T & { snapshot?: number };
    if (!signal?.aborted) noteAnswer(answer.snapshot ?? null);
    return answer;
  }
  const found = embedded(path);
  if (found === null) throw notExported(path);
  return JSON.parse(found.text) as T;
}

/** Send a write request to the server. Only a script of this page can send the header. */
export async function post<T>(path: string, body: unknown): Promise<T> {
  const headers = { Accept: "application/json", "Content-Type": "application/json", "X-Rolltape-Write": "1" };
  return (await (await respond(path, undefined, { method: "POST", headers, body: JSON.stringify(body) })).json()) as T;
}

export async function bytes(path: string, signal?: AbortSignal): Promise<ArrayBuffer> {
  if (!isStatic) return await (await respond(path, signal)).arrayBuffer();
  const found = embedded(path);
  if (found === null || !found.base64) throw notExported(path);
  const raw = atob(found.text.trim());
  return Uint8Array.from(raw, (character) => character.charCodeAt(0)).buffer;
}

export function rolloutPath(r: string, id: string, rest = ""): string {
  return `/api/${encodeURIComponent(r)}/rollouts/${encodeURIComponent(id)}${rest}`;
}
