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

/** Remove all that is kept, but for these names. */
export function removeAllBut(names) {
  const kept = names.map((name) => `tokenring.${name}`);
  for (const storage of [() => localStorage, () => sessionStorage]) {
    attempt(() => {
      for (const name of Object.keys(storage())) if (name.startsWith("tokenring.") && !kept.includes(name)) storage().removeItem(name);
    });
  }
}

/** Keep a value; null removes it. */
export function write(name, value, { tab = false } = {}) {
  attempt(() => {
    const storage = tab ? sessionStorage : localStorage;
    if (value === null) storage.removeItem(`tokenring.${name}`);
    else storage.setItem(`tokenring.${name}`, value);
  });
}
