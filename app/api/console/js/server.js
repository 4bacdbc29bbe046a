// Whether the server is there and can take requests, watched from here; views read `server`.
import { getJson, lastContact } from "./api.js";
import { effect, signal } from "./ui.js";

const SOON_MS = 1500;
const SELDOM_MS = 20_000;
/** A network that swallows requests is no better than none. */
const PATIENCE_MS = 8000;

/**
 * `state` is "ready", "waiting" (it starts, restarts its engine or stops), "away" (no answer) or "offline" (this
 * device has no network). `text` says why. Before the first answer `state` is "unknown".
 */
export const server = signal({ state: "unknown", text: "" });

const WORDS = {
  restarting: "The engine is restarting.",
  waiting: "The engine cannot be reached.",
  draining: "The server is stopping.",
  dead: "The engine has ended, and does not start again.",
};

/** What a phase of the server means to people who wait. Names of processes and exit codes are for its log. */
export function inWords(phase) {
  const [, kind, stage] = /^(\w*)(?:: )?(.*)$/s.exec(phase);
  if (kind === "starting") return `The model is loading${stage && !stage.includes("loads the model") ? ` (${stage})` : ""}.`;
  return WORDS[kind] ?? "The server takes no requests now.";
}

let timer = 0;
let asking = false;

function set(state, text = "") {
  if (server.peek().state !== state || server.peek().text !== text) server.value = { state, text };
}

/** Ask /readyz now, and again: often while the server is not ready, seldom while it is, not in a tab that is hidden. */
export async function look() {
  if (asking) return;
  asking = true;
  clearTimeout(timer);
  try {
    await getJson("/readyz", { key: "", signal: AbortSignal.timeout(PATIENCE_MS) });
    set("ready");
  } catch (error) {
    if (error.body?.phase) set("waiting", error.body.phase);
    else set(navigator.onLine ? "away" : "offline");
  }
  asking = false;
  const isReady = server.peek().state === "ready";
  timer = setTimeout(() => document.hidden || look(), isReady ? SELDOM_MS : SOON_MS);
}

/** Begin to watch. */
export function watch() {
  effect(() => {
    if (lastContact.value !== "answered") look();
  });
  window.addEventListener("online", look);
  window.addEventListener("offline", look);
  document.addEventListener("visibilitychange", () => !document.hidden && look());
  look();
}
