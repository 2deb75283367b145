/** The columns of the table: what they are called, how wide they are, and what they sort by. */

export interface Column {
  key: string;
  name: string;
  width: string;
  sort: string | null;
  first?: "up" | "down"; // which way a first click sorts
  right?: boolean;
}

export const COLUMNS: Column[] = [
  { key: "reward", name: "Reward", width: "80px", sort: "reward", first: "down", right: true },
  { key: "task", name: "Task", width: "minmax(150px, 1.6fr)", sort: "task" },
  { key: "step", name: "Step", width: "56px", sort: "step", right: true },
  { key: "attempt", name: "Attempt", width: "70px", sort: "attempt", right: true },
  { key: "status", name: "Status", width: "96px", sort: "status" },
  { key: "stop_reason", name: "Stop reason", width: "minmax(110px, 1fr)", sort: null },
  { key: "environment", name: "Environment", width: "minmax(90px, 0.8fr)", sort: null },
  { key: "turns", name: "Turns", width: "62px", sort: "turns", first: "down", right: true },
  { key: "tokens", name: "Sampled", width: "80px", sort: "tokens", first: "down", right: true },
  { key: "trained", name: "Trained", width: "76px", sort: null, right: true },
  { key: "forks", name: "Forks", width: "62px", sort: "forks", first: "down", right: true },
  { key: "took", name: "Took", width: "84px", sort: null, right: true },
  { key: "started", name: "Started", width: "92px", sort: "started", first: "down", right: true },
  { key: "id", name: "Id", width: "104px", sort: null },
];

export const TEMPLATE = COLUMNS.map((column) => column.width).join(" ");

/** The order after a click on a column that stands in this order now; "" is the tape's own. */
export function nextSort(column: Column, now: string | null): string {
  if (column.sort === null) return now ?? "";
  const up = column.sort, down = `-${column.sort}`;
  const [first, second] = column.first === "down" ? [down, up] : [up, down];
  return now === first ? second : now === second ? "" : first;
}
