// Files of conversations: llama.cpp's JSONL written and read; its older JSON, its ZIP and our own JSON read.
import { unzipped } from "./zip.js";

const HARNESS = "tokenring";
const MAX_TITLE = 200;

/** A file that cannot be imported; the message names the place and what is wrong. */
export class FileError extends Error {}

/** A conversation of GET /api/conversations/ID as lines: its session, then its messages. */
export function toJsonl(conversation) {
  const { id, title, model, created_at, updated_at, messages } = conversation;
  const root = `${id}-root`;
  const children = new Map(messages.map((message) => [message.id, []]));
  const tops = [];
  for (const message of messages) (children.get(message.parent_id) ?? tops).push(message.id);
  const session = {
    type: "session", harness: HARNESS, id, name: title, lastModified: updated_at * 1000, createdAt: created_at * 1000,
    currNode: messages.at(-1)?.id ?? root, model,
  };
  const top = { id: root, convId: id, type: "root", timestamp: created_at * 1000, role: "system", content: "", parent: null, children: tops };
  const written = messages.map((message) => toMessage(message, id, message.parent_id ?? root, children.get(message.id), model));
  return [session, ...[top, ...written].map((message) => ({ type: "message", message }))].map((line) => JSON.stringify(line)).join("\n");
}

function toMessage(message, convId, parent, children, model) {
  const { id, role, content, created_at, status, finish_reason, name } = message;
  const line = { id, convId, type: role === "system" ? "system" : "text", timestamp: created_at * 1000, role };
  const parts = Array.isArray(content) ? content : [{ type: "text", text: content ?? "" }];
  line.content = parts.filter((part) => part.type === "text").map((part) => part.text).join("\n");
  Object.assign(line, { parent, children });
  const images = parts.filter((part) => part.type === "image_url");
  if (images.length) line.extra = images.map((part, i) => ({ type: "IMAGE", name: `image ${i + 1}`, base64Url: part.image_url.url }));
  // What llama.cpp's format has no place for, so that an import has it again.
  if (Array.isArray(content) && !isPlain(content)) line.parts = content;
  if (message.reasoning_content) line.reasoningContent = message.reasoning_content;
  if (message.tool_calls) line.toolCalls = message.tool_calls;
  if (message.tool_call_id) line.toolCallId = message.tool_call_id;
  if (name) line.name = name;
  if (role === "assistant" && model) line.model = model;
  if (status !== "complete") line.status = status;
  if (finish_reason) line.finishReason = finish_reason;
  return line;
}

/** Whether parts are a text and images after it, of no certain detail: what `content` and `extra` say. */
function isPlain(parts) {
  const [first, ...rest] = parts;
  return first?.type === "text" && rest.length > 0 && rest.every((part) => part.type === "image_url" && !part.image_url.detail);
}

/**
 * The conversations of a file, as `{body, where, places}`: the body to POST, and what the conversation and each of
 * its messages is called in an error. The format is that of the contents, whatever the name. Throws FileError.
 */
export async function parseFile(buffer, name) {
  try {
    return await parseBytes(buffer, name);
  } catch (error) {
    if (!/\.(?!jsonl?$|zip$)[^.]+$/i.test(name)) throw error;
    throw new FileError(`${name} cannot be imported; export it as JSONL. Readable are JSONL, JSON and ZIP.`);
  }
}

async function parseBytes(buffer, name) {
  const bytes = new Uint8Array(buffer);
  if (bytes[0] === 0x50 && bytes[1] === 0x4b) {
    const texts = await unzipped(bytes).catch((error) => {
      throw new FileError(`${name}: ${error.message}`);
    });
    const read = texts.filter((file) => /\.jsonl?$/i.test(file.name)).flatMap((file) => parseText(decoded(file.bytes, file.name), file.name));
    if (!read.length) throw new FileError(`${name} has no .jsonl or .json file in it.`);
    return read;
  }
  return parseText(decoded(bytes, name), name);
}

function decoded(bytes, name) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    throw new FileError(`${name} is not UTF-8 text.`);
  }
}

/** The conversations of a text; see `parseFile`. */
export function parseText(text, name) {
  if (!text.trim()) throw new FileError(`${name} is empty.`);
  const records = linesOf(text, name);
  if (records) return fromRecords(records, name);
  const value = parsed(text, name);
  const all = Array.isArray(value) ? value : [value];
  if (!all.length) throw new FileError(`${name} has no conversation in it.`);
  return all.map((entry, i) => fromJson(entry, all.length > 1 ? `${name}, conversation ${i + 1}` : name));
}

/** The lines of a JSONL file as `{value, where}`; null where the text is one JSON value. */
function linesOf(text, name) {
  const lines = text.split("\n");
  const first = lines.find((line) => line.trim());
  if (!isRecord(first) && (lines.length === 1 || !isJson(first) || isJson(text))) return null;
  const records = [];
  for (const [i, line] of lines.entries()) {
    if (line.trim()) records.push({ value: parsed(line, `${name}, line ${i + 1}`), where: `${name}, line ${i + 1}` });
  }
  return records;
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

const isRecord = (line) => isJson(line) && ["session", "message"].includes(JSON.parse(line)?.type);

function parsed(text, where) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new FileError(`${where} is not JSON: ${error.message}.`);
  }
}

/** Sessions with their messages; other kinds of records are for other programs. A line may be a whole conversation. */
function fromRecords(records, name) {
  const sessions = [];
  for (const { value, where } of records) {
    if (value?.type === "session") sessions.push({ conv: value, messages: [], where, places: [] });
    else if (value?.type === "message") {
      if (!sessions.length) throw new FileError(`${where} is a message before any session.`);
      sessions.at(-1).messages.push(objectOf(value.message, where));
      sessions.at(-1).places.push(where);
    } else if (Array.isArray(value?.messages)) sessions.push({ whole: value, where });
  }
  if (!sessions.length) throw new FileError(`${name} has no conversation in it.`);
  return sessions.map((session) => (session.whole ? fromJson(session.whole, session.where) : fromLlama(session)));
}

function objectOf(value, where) {
  if (value === null || typeof value !== "object" || Array.isArray(value)) throw new FileError(`${where} has no message in it.`);
  return value;
}

function fromJson(value, where) {
  const messages = value?.messages;
  if (!Array.isArray(messages)) {
    throw new FileError(`${where} is no conversation: it has no list of messages. Exports of Tokenring and of llama.cpp can be imported.`);
  }
  const places = messages.map((_, i) => `${where}, message ${i + 1}`);
  messages.forEach((message, i) => objectOf(message, places[i]));
  if (value.conv) return fromLlama({ conv: value.conv, messages, where, places });
  const kept = messages.map(({ usage, request_id, choice, ...message }) => message);
  return { body: withoutNulls({ title: titleOf(value.title), model: value.model, messages: kept }), where, places };
}

/** A conversation of llama.cpp's, its messages in an order in which each comes after the one above it. */
function fromLlama({ conv, messages, where, places }) {
  const order = ordered(conv, messages, where);
  const ids = new Map(order.map((at, i) => [messages[at].id, `m${i}`]));
  const body = {
    title: titleOf(conv.name ?? conv.title),
    model: conv.model ?? messages.findLast((message) => typeof message.model === "string" && message.model)?.model,
    messages: order.map((at, i) => fromMessage(messages[at], `m${i}`, ids.get(messages[at].parent) ?? null, places[at])),
  };
  if (!order.length) throw new FileError(`${where} has no message in it.`);
  return { body: withoutNulls(body), where, places: order.map((at) => places[at]) };
}

/** The indices of messages, parents first; else by time, in our own files as they stand; the open branch last. */
function ordered(conv, messages, where) {
  const isOurs = conv.harness === HARNESS;
  const at = new Map(messages.map((message, i) => [message.id, i]));
  const byTime = [...messages.keys()].filter((i) => messages[i].type !== "root");
  if (!isOurs) byTime.sort((a, b) => (messages[a].timestamp ?? 0) - (messages[b].timestamp ?? 0) || a - b);
  const open = at.get(conv.currNode);
  if (!isOurs && open !== undefined && !messages.some((message) => message.parent === conv.currNode)) {
    byTime.push(...byTime.splice(byTime.indexOf(open), byTime.includes(open) ? 1 : 0));
  }
  const [order, placed] = [[], new Set()];
  for (const start of byTime) {
    const chain = [];
    for (let i = start; i !== undefined && !placed.has(i) && messages[i].type !== "root"; i = at.get(messages[i].parent)) {
      if (chain.length > messages.length) throw new FileError(`${where}: its messages stand in a circle.`);
      chain.push(i);
    }
    for (const i of chain.reverse()) {
      if (!placed.has(i)) order.push(i);
      placed.add(i);
    }
  }
  return order;
}

function fromMessage(message, id, parentId, where) {
  const { role, timestamp, status } = message;
  const isTime = Number.isFinite(timestamp) && timestamp >= 0;
  const calls = role === "assistant" ? callsOf(message.toolCalls, where) : undefined;
  return withoutNulls({
    id, role, status,
    content: contentOf(message) || (calls ? null : ""), // without a text beside its calls, as servers say it
    created_at: isTime ? Math.floor(timestamp / 1000) : undefined,
    finish_reason: message.finishReason,
    name: message.name,
    reasoning_content: role === "assistant" ? message.reasoningContent || message.thinking || undefined : undefined,
    tool_call_id: role === "tool" ? message.toolCallId : undefined,
    tool_calls: calls,
  }, { parent_id: parentId });
}

function callsOf(calls, where) {
  if (!calls) return undefined;
  const list = typeof calls === "string" ? parsed(calls, `${where}: toolCalls`) : calls;
  return Array.isArray(list) && list.length ? list : undefined;
}

/** A text, or parts where images are attached. Attached texts stand below the message, as llama.cpp sends them. */
function contentOf({ content, extra, parts }) {
  if (Array.isArray(parts)) return parts;
  if (Array.isArray(content)) return content;
  const [texts, images] = [[content ?? ""], []];
  for (const attached of Array.isArray(extra) ? extra : []) {
    if (typeof attached?.base64Url === "string") images.push({ type: "image_url", image_url: { url: attached.base64Url } });
    else if (typeof attached?.content === "string") texts.push(`--- File: ${attached.name ?? ""} ---\n${attached.content}`);
    else if (attached) texts.push(`(${attached.name ?? "a file"} was attached)`);
  }
  const text = texts.filter((one, i) => one || !i).join("\n\n");
  return images.length ? [{ type: "text", text }, ...images] : text;
}

const titleOf = (title) => (typeof title === "string" && title.trim() ? [...title.trim()].slice(0, MAX_TITLE).join("") : undefined);

function withoutNulls(fields, more = {}) {
  return { ...Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== undefined && value !== null)), ...more };
}
