/** Places of a transcript on the screen: scroll to one, and find the turn that is being read. */

const HEAD = 48; // pixels of the page's head
const GAP = 6;
let current: (() => void) | null = null; // ends the previous scroll
const SETTLES_MS = 1500; // time for images, fonts and the highlighter to load

/** The top of the reader's view: below the page's head and the transcript's bar, which do not scroll. */
function viewTop(): number {
  return HEAD + GAP + (document.querySelector<HTMLElement>("[data-bar]")?.offsetHeight ?? 0);
}

/** Scroll a place to the top of the view, or `below` it, and keep it there until all is drawn or the reader scrolls. */
export function bringIntoView(find: () => Element | Range | null | undefined, below = 0): void {
  current?.();
  const until = performance.now() + SETTLES_MS;
  const moves = ["wheel", "touchstart", "pointerdown", "keydown"] as const;
  let over = false;
  const stop = () => {
    over = true;
    if (current === stop) current = null;
    for (const move of moves) removeEventListener(move, stop, true);
  };
  for (const move of moves) addEventListener(move, stop, { capture: true, passive: true });
  current = stop;
  const align = () => {
    if (over) return;
    const goal = viewTop() + below;
    const off = (find()?.getBoundingClientRect().top ?? goal) - goal;
    if (Math.abs(off) > 1) scrollBy({ top: off, behavior: "instant" });
    if (performance.now() < until) requestAnimationFrame(align);
    else stop();
  };
  align();
}

/** The last of some elements that begins above the reading position. */
export function elementAtTop(elements: Iterable<Element>): Element | null {
  let found: Element | null = null;
  const top = viewTop() + 24;
  for (const element of elements) {
    if (found !== null && element.getBoundingClientRect().top > top) break;
    found = element;
  }
  return found;
}
