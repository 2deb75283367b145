/** The tags and notes of the rollout in view, and their changes. */

import { post, rolloutPath } from "../api/client";
import { mayAnnotate, session } from "./session.svelte";

export const BOOKMARK = "bookmark"; // the tag that the star sets

export interface Tag {
  name: string;
  turn?: string;
  tokens?: [number, number]; // from the first up to the second, among the turn's ids
  by?: string;
  at_ns?: number; // absent if the rollout was started with it
}

export interface Note {
  id: string;
  text: string;
  turn?: string;
  tokens?: [number, number];
  by?: string;
  at_ns: number;
  edited_by?: string;
  edited_at_ns?: number;
}

export interface Annotations {
  tags: Tag[];
  notes: Note[];
}

export interface Place {
  turn: string | null; // null for the whole rollout
  tokens: [number, number] | null; // null for the whole turn
}

interface Change {
  add_tags?: string[];
  remove_tags?: string[];
  note?: string;
  text?: string | null;
}

const NONE: Annotations = { tags: [], notes: [] };

export class Annotating {
  held = $state.raw<Annotations>(NONE);
  failure = $state("");
  #rollout: () => { r: string; id: string; tried: number };

  constructor(rollout: () => { r: string; id: string; tried: number }, found: () => Annotations | undefined) {
    this.#rollout = rollout;
    $effect(() => {
      this.held = found() ?? NONE;
    });
  }

  get may(): boolean {
    return mayAnnotate(this.#rollout().r);
  }

  at(place: Place): Annotations {
    const here = (one: Tag | Note) =>
      (one.turn ?? null) === place.turn && one.tokens?.[0] === place.tokens?.[0] && one.tokens?.[1] === place.tokens?.[1];
    return { tags: this.held.tags.filter(here), notes: this.held.notes.filter(here) };
  }

  /** The places of tokens with tags or notes, of a turn or of all turns. */
  tokens(turn: string | null = null): { turn: string; tokens: [number, number] }[] {
    const found = new Map<string, { turn: string; tokens: [number, number] }>();
    for (const { turn: own, tokens } of [...this.held.tags, ...this.held.notes]) {
      if (own !== undefined && tokens !== undefined && (turn === null || own === turn)) found.set(`${own} ${tokens}`, { turn: own, tokens });
    }
    return [...found.values()].sort((a, b) => a.tokens[0] - b.tokens[0]);
  }

  /** Write a change, and return whether it was written. `failure` has the error. */
  async write(place: Place, change: Change): Promise<boolean> {
    const { r, id, tried } = this.#rollout();
    const body = { ...change, ...(place.turn === null ? {} : { turn: place.turn }), ...(place.tokens === null ? {} : { tokens: place.tokens }), by: session.author };
    try {
      this.held = await post<Annotations>(rolloutPath(r, id, `/annotations?try=${tried}`), body);
      this.failure = "";
      return true;
    } catch (error) {
      this.failure = error instanceof Error ? error.message : String(error);
      return false;
    }
  }
}
