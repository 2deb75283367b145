/** Keyboard shortcuts: views declare them, and the help lists them. */

export interface Shortcut {
  key: string;
  says: string;
  run: () => void;
  shown?: string;
}

const groups: Shortcut[][] = [];

/** Register shortcuts while the calling component is on the page. */
export function useKeys(shortcuts: Shortcut[]): void {
  $effect(() => {
    groups.push(shortcuts);
    return () => groups.splice(groups.indexOf(shortcuts), 1);
  });
}

export function allShortcuts(): Shortcut[] {
  return groups.flat();
}

function isTyping(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName));
}

export function onKey(event: KeyboardEvent): void {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && isTyping(event.target)) {
    (event.target as HTMLElement).blur();
    return;
  }
  if (isTyping(event.target)) return;
  // A dialog handles its own keys; the page behind it handles none.
  if (document.querySelector("dialog[open]")) return;
  // Enter and Space belong to the button or link that has the focus.
  if ((event.key === "Enter" || event.key === " ") && (event.target as Element | null)?.closest("a,button,summary")) return;
  for (const group of [...groups].reverse()) {
    const found = group.find((shortcut) => shortcut.key === event.key);
    if (found) {
      event.preventDefault();
      found.run();
      return;
    }
  }
}
