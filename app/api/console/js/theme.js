// Light, dark, or as the system has it.
import { read, write } from "./storage.js";
import { signal } from "./ui.js";

export const THEMES = { auto: "as the system", light: "light", dark: "dark" };

export const theme = signal(read("theme") ?? "auto");

/** Use a theme, and remember it in this browser. */
export function setTheme(name) {
  show(name);
  write("theme", name === "auto" ? null : name);
}

function show(name) {
  theme.value = name;
  document.documentElement.dataset.theme = name;
}

window.addEventListener("storage", (event) => event.key === "tokenring.theme" && show(event.newValue ?? "auto"));
