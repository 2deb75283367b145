/** The reader's choice of texts: formatted, or as recorded. It is stored between visits. */

const KEY = "rolltape-plain-text";

function stored(): boolean {
  try {
    return localStorage.getItem(KEY) === "yes";
  } catch {
    return false;
  }
}

const state = $state({ plain: stored() });

export const reading = {
  get plain(): boolean {
    return state.plain;
  },
  set plain(plain: boolean) {
    state.plain = plain;
    try {
      localStorage.setItem(KEY, plain ? "yes" : "no");
    } catch {
      // Without storage it is kept until the page is closed.
    }
  },
};
