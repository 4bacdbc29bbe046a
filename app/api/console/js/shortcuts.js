// Shortcuts of the keyboard, all with a modifier or Escape, so that none is typed by accident.
import { signal } from "./ui.js";

/** What is bound now, as `{keys, label}`; the help shows it. */
export const shortcuts = signal([]);

/**
 * Bind a combination as "Ctrl+Shift+O" (Command counts as Ctrl) or "Escape" until the function that is returned is
 * called. `run(event)` may return false: then the key does what it does elsewhere.
 */
export function bind(keys, label, run) {
  const entry = { keys, label, run };
  shortcuts.value = [...shortcuts.peek(), entry];
  return () => {
    shortcuts.value = shortcuts.peek().filter((other) => other !== entry);
  };
}

function named(event) {
  const parts = [];
  if (event.ctrlKey || event.metaKey) parts.push("Ctrl");
  if (event.altKey) parts.push("Alt");
  if (event.shiftKey && (parts.length > 0 || event.key.length > 1)) parts.push("Shift");
  return [...parts, event.key.length === 1 ? event.key.toUpperCase() : event.key].join("+");
}

window.addEventListener("keydown", (event) => {
  if (event.isComposing || event.defaultPrevented) return;
  const keys = named(event);
  for (const entry of shortcuts.peek().toReversed()) {
    if (entry.keys === keys && entry.run(event) !== false) {
      event.preventDefault();
      return;
    }
  }
});
