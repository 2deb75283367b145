/** The theme: light, dark, or the system's; stored in this browser. */

export type Theme = "system" | "light" | "dark";
const KEY = "rolltape-theme";

function remembered(): Theme {
  try {
    const stored = localStorage.getItem(KEY);
    return stored === "light" || stored === "dark" ? stored : "system";
  } catch {
    return "system"; // a page opened from a file may have no storage
  }
}

const system = matchMedia("(prefers-color-scheme: dark)");
const state = $state({ chosen: remembered(), systemDark: system.matches });
system.addEventListener("change", (event) => (state.systemDark = event.matches));

function apply(): void {
  if (state.chosen === "system") delete document.documentElement.dataset["theme"];
  else document.documentElement.dataset["theme"] = state.chosen;
}
apply();

export const theme = {
  get chosen(): Theme {
    return state.chosen;
  },
  get dark(): boolean {
    return state.chosen === "dark" || (state.chosen === "system" && state.systemDark);
  },
  choose(next: Theme): void {
    state.chosen = next;
    apply();
    try {
      localStorage.setItem(KEY, next);
    } catch {
      // Without storage it is kept until the page is closed.
    }
  },
};

/** The current value of a color of the theme, for canvases, which read it again when `theme.dark` changes. */
export function color(name: string): string {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}
