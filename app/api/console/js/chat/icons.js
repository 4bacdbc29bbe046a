// Icons as lines of 16 by 16.
import { html } from "../ui.js";

const PATHS = {
  copy: "M5.5 5.5h8v8h-8zM2.5 10.5v-8h8",
  edit: "M3 13l.8-3L11 2.8 13.2 5 6 12.2z",
  again: "M13 8a5 5 0 1 1-1.5-3.6M13 2v3h-3",
  resume: "M3 8a5 5 0 1 1 1.5 3.6M3 14v-3h3",
  go: "M4 3l8 5-8 5z",
  stop: "M4 4h8v8H4z",
  send: "M8 13V3M3.5 7.5L8 3l4.5 4.5",
  down: "M8 3v10M3.5 8.5L8 13l4.5-4.5",
  left: "M10 3L5 8l5 5",
  right: "M6 3l5 5-5 5",
  clip: "M13 7.5l-5.3 5.3a3.2 3.2 0 0 1-4.5-4.5L8.8 2.7a2.1 2.1 0 0 1 3 3L6.4 11a1 1 0 0 1-1.5-1.5l4.8-4.8",
  tune: "M2 5h6M12 5h2M10 3v4M2 11h2M8 11h6M6 9v4",
  tool: "M9.5 6.5L3 13M9 3a3.5 3.5 0 0 1 4.5 4.5L11.500 5.500z",
};

export const icon = (name) => html`<svg viewBox="0 0 16 16" aria-hidden="true"><path d=${PATHS[name]} /></svg>`;
