/** Named presets of filters, and the reader's own ones, which the browser stores. */

export const PRESET_WORDS: Record<string, { name: string; about: string }> = {
  rewarded_truncated: { name: "rewarded and truncated", about: "a reward above 0, and a limit on tokens ended the rollout or one of its replies" },
  rewarded_short: { name: "rewarded and very short", about: "a reward above 0, and at most a quarter of the sampled tokens that are the median of its task (of the run, if its task has fewer than 4 rollouts)" },
  edited_tests: { name: "edited tests", about: "a tool call changes a file that is named as tests are, as far as its arguments tell" },
  far_from_group: { name: "reward far from its group", about: "3 standard deviations or more from the other attempts of its group (at least 3), and a quarter of the run's range of rewards" },
};

const KEY = "rolltape-filters";

function load(): Record<string, string> {
  try {
    const held: unknown = JSON.parse(localStorage.getItem(KEY) ?? "{}");
    if (typeof held !== "object" || held === null) return {};
    return Object.fromEntries(Object.entries(held).filter((one): one is [string, string] => typeof one[1] === "string"));
  } catch {
    return {}; // no storage, or it has something else
  }
}

/** The reader's own filters: by name, the query of the table. */
class SavedFilters {
  all = $state.raw(load());

  save(name: string, query: string): void {
    this.#keep({ ...load(), [name]: query });
  }

  remove(name: string): void {
    this.#keep(Object.fromEntries(Object.entries(load()).filter(([held]) => held !== name)));
  }

  #keep(filters: Record<string, string>): void {
    this.all = filters;
    try {
      localStorage.setItem(KEY, JSON.stringify(filters));
    } catch {
      // Without storage they are kept until the page is closed.
    }
  }
}

export const saved = new SavedFilters();
