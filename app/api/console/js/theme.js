// Light, dark, or as the system has it.
import { read, write } from "./storage.js";
import { signal } from "./ui.js";

export const THEMES = ["auto", "light", "dark"];

export const theme = signal(read("theme") ?? "auto");

/** Use a theme, and remember it in this browser. */
export function setTheme(name) {
  theme.value = name;
  document.documentElement.dataset.theme = name;
  write("theme", name === "auto" ? null : name);
}
