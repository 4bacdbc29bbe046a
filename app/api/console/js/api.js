// Requests to the server: the key, errors as ApiError, and streams of events.
import { signal } from "./ui.js";

/** The API key; empty for none. js/session.js keeps it. */
export const key = signal("");

/** How the last request ended: "answered", "not_ready", or "unreachable" where no answer came; js/server.js watches it. */
export const lastContact = signal("answered");

/** How many requests were refused as 401: js/session.js asks for a key then. */
export const refusals = signal(0);

/** An error that the server answered, or status 0 and code "unreachable" where it did not. */
export class ApiError extends Error {
  constructor(status, { code = "unknown", message = "The server did not say why.", param = null }, { retryAfterS = null, body = null } = {}) {
    super(message);
    Object.assign(this, { name: "ApiError", status, code, param, retryAfterS, body });
  }
}

/** What an error says, and when to try again. */
export function explain(error) {
  const wait = error.retryAfterS ? ` Try again in ${error.retryAfterS} s.` : "";
  return `${error.message ?? error}${wait}`;
}

/** The address of a route, wherever the console is mounted. */
export function urlOf(path) {
  return new URL(path.replace(/^\//, ""), document.baseURI).href;
}

/** The server's answer. Throws ApiError, and what `signal` was aborted with. */
export async function request(method, path, { json, headers = {}, signal, key: text = key.value } = {}) {
  const sent = { ...headers };
  if (text) sent.Authorization = `Bearer ${text}`;
  if (json !== undefined) sent["Content-Type"] = "application/json";
  let response;
  try {
    const body = json === undefined ? undefined : JSON.stringify(json);
    response = await fetch(urlOf(path), { method, headers: sent, body, signal, cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    throw signal?.aborted ? error : unreachable();
  }
  // A proxy in front of a server that is down answers for it, and not in our words.
  const isProxys = [502, 503, 504].includes(response.status) && !isJson(response);
  lastContact.value = isProxys ? "unreachable" : response.status === 503 ? "not_ready" : "answered";
  if (response.ok) return response;
  const error = await errorOf(response);
  if (error.status === 401 && text === key.value) refusals.value += 1;
  throw error;
}

function isJson(response) {
  return (response.headers.get("content-type") ?? "").includes("json");
}

function unreachable() {
  lastContact.value = "unreachable";
  return new ApiError(0, { code: "unreachable", message: "The server cannot be reached." });
}

async function errorOf(response) {
  const body = isJson(response) ? await response.json().catch(() => null) : null;
  const waitS = Number.parseInt(response.headers.get("retry-after") ?? "", 10);
  const fallback = { code: `http_${response.status}`, message: `The server answered with status ${response.status}.` };
  return new ApiError(response.status, body?.error ?? fallback, { retryAfterS: Number.isNaN(waitS) ? null : waitS, body });
}

/** The JSON of a GET. Throws ApiError. */
export async function getJson(path, options) {
  return (await request("GET", path, options)).json();
}

/** The JSON that answers a request with a body; null where there is none. Throws ApiError. */
export async function sendJson(method, path, body, headers) {
  const text = await (await request(method, path, { json: body, headers })).text();
  return text ? JSON.parse(text) : null;
}

/**
 * The events of a stream, as `{id, data}`: `data` is parsed JSON, or the string "[DONE]". It does not reconnect.
 *
 * `onOpen(response)` is called once the server has answered, `onBytes()` when anything arrives, heartbeats too. Throws
 * ApiError, "unreachable" for a stream that is cut.
 */
export async function* events(path, { method = "GET", json, headers = {}, lastEventId, signal, onOpen, onBytes } = {}) {
  const sent = { Accept: "text/event-stream", ...headers };
  if (lastEventId !== undefined && lastEventId !== null) sent["Last-Event-ID"] = String(lastEventId);
  const response = await request(method, path, { json, headers: sent, signal });
  onOpen?.(response);
  if (response.status === 204) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const parser = new EventParser();
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        throw signal?.aborted ? error : unreachable();
      });
      if (done) return;
      onBytes?.();
      yield* parser.feed(value);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Text of a stream of server-sent events in, its events out. */
export class EventParser {
  #rest = "";
  #id = null;
  #data = [];

  /** The events that are complete with this text. */
  feed(text) {
    const lines = (this.#rest + text).split(/\r\n|\n/);
    this.#rest = lines.pop();
    return lines.map((line) => this.#line(line)).filter(Boolean);
  }

  #line(line) {
    if (line === "") return this.#dispatch();
    const [, name, value] = /^([^:]*):? ?(.*)$/s.exec(line);
    if (name === "data") this.#data.push(value);
    if (name === "id") this.#id = value;
    return null;
  }

  #dispatch() {
    const data = this.#data.join("\n");
    this.#data = [];
    if (data === "") return null;
    return { id: this.#id, data: data === "[DONE]" ? data : JSON.parse(data) };
  }
}
