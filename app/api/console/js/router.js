// Addresses after the #, so that every view can be linked and the server serves one page.
import { signal } from "./ui.js";

const NAMES = ["chat", "usage", "admin"];

/** The view and what it shows: `#/chat/ID` is `{name: "chat", id: "ID"}`; id is null without one. */
export const route = signal(parse(location.hash));

export function parse(hash) {
  const [, name, ...rest] = hash.split("/");
  if (!NAMES.includes(name)) return { name: "chat", id: null };
  return { name, id: decoded(rest.join("/")) || null };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Go to an address, as `#/usage`; with `replace` the way back does not lead here. */
export function navigate(hash, { replace = false } = {}) {
  if (replace) history.replaceState(null, "", hash);
  else if (location.hash !== hash) history.pushState(null, "", hash);
  update();
}

function update() {
  const next = parse(location.hash);
  if (next.name !== route.value.name || next.id !== route.value.id) route.value = next;
}

window.addEventListener("hashchange", update);
window.addEventListener("popstate", update);
