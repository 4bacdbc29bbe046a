// The browser's storage, which may be switched off or full: then nothing is remembered.
function attempt(work) {
  try {
    return work();
  } catch {
    return null;
  }
}

/** A value of localStorage, or of sessionStorage with `tab`; null without one. */
export function read(name, { tab = false } = {}) {
  return attempt(() => (tab ? sessionStorage : localStorage).getItem(`tokenring.${name}`));
}

/** Keep a value; null removes it. */
export function write(name, value, { tab = false } = {}) {
  attempt(() => {
    const storage = tab ? sessionStorage : localStorage;
    if (value === null) storage.removeItem(`tokenring.${name}`);
    else storage.setItem(`tokenring.${name}`, value);
  });
}

/** Forget everything of a person in this browser and this tab; the theme stays. */
export function clear() {
  for (const storage of attempt(() => [localStorage, sessionStorage]) ?? []) {
    const names = Object.keys(storage).filter((name) => name.startsWith("tokenring.") && name !== "tokenring.theme");
    for (const name of names) storage.removeItem(name);
  }
}
