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
  // On some keyboards a sign such as / needs Shift.
  if (event.shiftKey && /^([a-z]|..+)$/i.test(event.key)) parts.push("Shift");
  return [...parts, event.key.length === 1 ? event.key.toUpperCase() : event.key].join("+");
}

window.addEventListener("keydown", (event) => {
  // Dialogs and menus have the keyboard for themselves.
  if (event.isComposing || event.defaultPrevented || document.querySelector("dialog[open], :popover-open")) return;
  const keys = named(event);
  for (const entry of shortcuts.peek().toReversed()) {
    if (entry.keys === keys && entry.run(event) !== false) {
      event.preventDefault();
      return;
    }
  }
});
