// Follows one answer to its end, over lost networks, dead engines and restarts of the server.
import { ApiError, events, sendJson } from "../api.js";
import { look, server } from "../server.js";
import { fold } from "./fold.js";

const PATH = "/api/chat/completions";
const QUIET_MS = 2500; // then the server is asked what it is doing
const DEAD_MS = 40_000; // two heartbeats were missed
const BREATH_MS = 12;
const STARTING = ["engine_not_ready", "draining", "unavailable"];

/**
 * Adds the events of an answer to it until [DONE]. `post` is {key, json}, the request that it answers.
 *
 * `on` has `signal`; `change()`, after each event; `resumed(eventId)`, when events follow that one after a break; and
 * `state({kind, until, since})`: "quiet", "starting", "lost", "offline", or null while events arrive. Throws an ApiError that
 * its user has to decide about.
 */
export async function follow(answer, post, on) {
  let attempts = 0;
  let returns = answer.lastEventId > 0;
  while (!answer.done && !on.signal.aborted) {
    const line = new Line(on);
    try {
      for await (const event of line.events(answer, post)) {
        if (returns && answer.lastEventId) on.resumed(answer.lastEventId);
        returns = false;
        attempts = 0;
        fold(answer, event);
        on.state(null);
        on.change();
        await line.breathe();
      }
      if (line.isOver) answer.done = true;
      returns = true;
      if (!answer.done) await pause({ status: 0 }, attempts, on);
    } catch (error) {
      if (on.signal.aborted) return;
      if (!(error instanceof ApiError || error.name === "AbortError")) throw error;
      if (!isPassing(error, answer, returns)) throw error;
      returns = true;
      await pause(error, attempts, on);
    } finally {
      line.close();
    }
    attempts += 1;
  }
}

/** One connection: given up when the network goes, or when not even heartbeats arrive. */
class Line {
  #abort = new AbortController();
  #close = () => this.#abort.abort();
  #dead = 0;
  #quiet = 0;
  #breathed = performance.now();
  #heardMs = Date.now();
  isOver = false;

  constructor(on) {
    this.on = on;
    on.signal.addEventListener("abort", this.#close);
    window.addEventListener("offline", this.#close);
    this.#listen();
  }

  events(answer, { key, json }) {
    const { lastEventId } = answer;
    const known = { signal: this.#abort.signal, lastEventId: lastEventId || null };
    known.onOpen = (response) => {
      answer.id = response.headers.get("x-request-id") ?? answer.id;
      this.isOver = response.status === 204;
      this.#heardMs = Date.now();
      this.#alive();
    };
    known.onBytes = () => this.#alive();
    if (answer.id) return events(`${PATH}/${answer.id}`, known);
    return events(PATH, { ...known, method: "POST", json, headers: { "Idempotency-Key": key } });
  }

  // A long replay lets the page draw and answer its user.
  async breathe() {
    this.#heardMs = Date.now();
    this.#listen();
    if (performance.now() - this.#breathed < BREATH_MS) return;
    await new Promise((resolve) => setTimeout(resolve));
    this.#breathed = performance.now();
  }

  #alive() {
    clearTimeout(this.#dead);
    this.#dead = setTimeout(this.#close, DEAD_MS);
  }

  #listen() {
    clearTimeout(this.#quiet);
    this.#quiet = setTimeout(() => {
      this.on.state({ kind: "quiet", since: this.#heardMs });
      look();
      this.#listen();
    }, QUIET_MS);
  }

  close() {
    clearTimeout(this.#dead);
    clearTimeout(this.#quiet);
    this.on.signal.removeEventListener("abort", this.#close);
    window.removeEventListener("offline", this.#close);
    this.#close();
  }
}

/** True if the same request may be sent again without asking anybody: it is known by its key, or by its id. */
function isPassing({ status, code, name }, answer, returns) {
  if (name === "AbortError" || [0, 502, 504].includes(status)) return true;
  if (status === 429) return answer.id !== null;
  if (status === 503) return returns || answer.id !== null || STARTING.includes(code);
  if (code !== "invalid_last_event_id" || !answer.lastEventId) return false;
  Object.assign(answer, { text: "", reasoning: "", tools: [], finish: null, error: null, lastEventId: 0 });
  return true;
}

async function pause({ status, retryAfterS }, attempts, on) {
  const ms = retryAfterS ? retryAfterS * 1000 : Math.min(8000, 400 * 2 ** attempts);
  const until = Date.now() + ms * (0.8 + Math.random() * 0.4);
  const kind = () => (navigator.onLine === false ? "offline" : status === 503 ? "starting" : "lost");
  look();
  await new Promise((resolve) => {
    const isDue = () => navigator.onLine !== false && (Date.now() >= until || (kind() === "starting" && server.peek().state === "ready"));
    const timer = setInterval(() => (isDue() ? end() : on.state({ kind: kind(), until })), 250);
    const end = () => {
      clearInterval(timer);
      window.removeEventListener("online", end);
      on.signal.removeEventListener("abort", end);
      resolve();
    };
    window.addEventListener("online", end);
    on.signal.addEventListener("abort", end);
    on.state({ kind: kind(), until });
  });
  on.state({ kind: kind(), until: null });
}

export const cancel = (id) => sendJson("POST", `${PATH}/${id}/cancel`);
