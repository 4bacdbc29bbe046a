// One message: what was asked, or an answer with all that is to be said about it.
import { compact, dateTime, duration, money, number } from "../format.js";
import { navigate } from "../router.js";
import { inWords, server } from "../server.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "../ui.js";
import { copyText } from "./copy.js";
import { imagesOf, textOf } from "./fold.js";
import { icon } from "./icons.js";
import { MarkdownView } from "./markdown.js";
import { costUsd } from "./settings.js";

const SLOW_MS = 100;

/** An item of the list: a message, or an answer and those that continue it. */
export function Message({ chat, item }) {
  const { head, messages } = item;
  const live = chat.live.value;
  const isLive = messages.includes(live?.message);
  for (const message of messages) message.tick?.value;
  if (head.role !== "assistant") return html`<${Asked} chat=${chat} message=${head} busy=${live !== null} />`;
  return html`<div class="answer" aria-busy=${String(isLive)}>
    <h2 class="visually-hidden">Answer</h2>
    ${messages.map((message) => html`<${Reasoning} answer=${message.answer} isLive=${isLive} />`)}
    <${Markdown} text=${messages.map(({ answer }) => answer.text).join("")} isLive=${isLive} />
    ${messages.flatMap(({ answer }) => answer.tools).map((tool) => html`<${Tool} tool=${tool} />`)}
    ${isLive ? html`<${Progress} live=${live} />` : html`<${Ending} chat=${chat} message=${messages.at(-1)} />`}
    ${messages.flatMap(({ resumed }) => resumed ?? []).map((id) => html`<span class="resumed">${icon("resume")} Resumed at event ${number(id)}</span>`)}
    ${!isLive && html`<${AnswerFoot} chat=${chat} item=${item} busy=${live !== null} />`}
  </div>`;
}

function Asked({ chat, message, busy }) {
  const [text, setText] = useState(null);
  const field = useRef(null);
  const { content, role } = message;
  const shown = textOf(content);
  useEffect(() => field.current?.focus(), [text === null]);
  message.edit = () => setText(shown);
  const save = () => {
    setText(null);
    const others = Array.isArray(content) ? content.filter((part) => part.type !== "text") : [];
    chat.edit(message, others.length ? [{ type: "text", text }, ...others] : text);
  };
  const onKeyDown = (event) => {
    if (event.key === "Escape") setText(null);
    else if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    else if (text.trim()) save();
    event.preventDefault();
    event.stopPropagation();
  };
  if (text !== null) {
    return html`<div class="asked editing">
      <textarea ref=${field} rows=${Math.min(12, text.split("\n").length + 1)} dir="auto" aria-label="Edit your message"
        value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${onKeyDown}></textarea>
      <div class="row"><button onClick=${() => setText(null)}>Cancel</button>
      <button class="primary" disabled=${!text.trim()} onClick=${save}>Send as another branch</button></div>
    </div>`;
  }
  if (role === "tool" || role === "system" || role === "developer") {
    return html`<details class="aside"><summary>${role === "tool" ? "Result of the tool" : "System prompt"}</summary><pre dir="auto">${shown}</pre></details>`;
  }
  return html`<div class="asked">
    <h2 class="visually-hidden">You</h2>
    ${imagesOf(content).map((url) => html`<img src=${url} alt="Attached image" />`)}
    ${shown && html`<p dir="auto">${shown}</p>`}
    <div class="foot">
      <${Siblings} chat=${chat} message=${message} busy=${busy} />
      <${Copy} text=${shown} />
      <button class="plain icon" aria-label="Edit" title="Edit as another branch" disabled=${busy} onClick=${() => setText(shown)}>${icon("edit")}</button>
    </div>
  </div>`;
}

function Markdown({ text, isLive }) {
  const element = useRef(null);
  const view = useRef(null);
  const due = useRef(0);
  useLayoutEffect(() => {
    view.current ??= new MarkdownView(element.current);
    const begun = performance.now();
    if (isLive && begun < due.current) return;
    view.current.draw(text, !isLive);
    const took = performance.now() - begun;
    due.current = took > SLOW_MS ? begun + 4 * took : 0; // a text that is slow to draw leaves the page to its user
  }, [text, isLive]);
  return html`<div class="md" ref=${element}></div>`;
}

function Reasoning({ answer, isLive }) {
  if (!answer.reasoning) return null;
  const thinking = isLive && !answer.text && !answer.tools.length;
  return html`<details class="aside">
    <summary>${thinking ? "Thinking…" : "Thoughts"}</summary>
    <p dir="auto">${answer.reasoning}</p>
  </details>`;
}

function Tool({ tool }) {
  return html`<div class="tool">${icon("tool")} Calls <b>${tool.name}</b> <code>${tool.arguments}</code></div>`;
}

function useClock(isRunning) {
  const [, tick] = useState(0);
  useEffect(() => {
    if (!isRunning) return undefined;
    const timer = setInterval(() => tick(Date.now()), 500);
    return () => clearInterval(timer);
  }, [isRunning]);
}

const seconds = (until) => Math.max(0, Math.ceil((until - Date.now()) / 1000));

/** What an answer on its way is waiting for. */
function Progress({ live }) {
  const state = live.state.value;
  useClock(Boolean(state));
  return html`<div class="progress" role="status">
    ${!state && !live.stopping.value ? html`<span class="dots" aria-label="The answer is being written"></span>` : progressText(live, state)}
  </div>`;
}

function progressText({ stopping, answer }, state) {
  const { state: where } = server.value;
  if (stopping.value) return "Stopping…";
  const waited = duration((Date.now() - state.since) / 1000);
  const again = state.until ? ` Trying again in ${seconds(state.until)} s.` : "";
  if (state.kind === "offline") return "You are offline. The answer goes on once you are back.";
  if (state.kind === "lost") return `The connection was lost. The answer goes on where it was.${again}`;
  if (where === "waiting") return `The answer goes on by itself.${again}`; // the banner says why
  if (state.kind === "starting") return `${inWords("restarting")} The answer goes on by itself.${again}`;
  return answer.id ? `The model is silent for ${waited}; the connection is kept.` : `Waiting for a place in the queue for ${waited}.`;
}

const ENDINGS = {
  blocked: "The safety policy stopped this answer.",
  cancelled: "Stopped.",
  interrupted: "The server ended while it answered. This is what it had sent.",
  deleted: "This answer was deleted.",
  length: "The answer reached its token limit.",
};

/** How an answer ended, unless it is simply complete. */
function Ending({ chat, message }) {
  const { answer, status } = message;
  if (status === "unsent") return html`<${Problem} problem=${chat.problem.value} />`;
  const budget = answer.budget?.message ?? answer.abandoned?.message;
  const kind = ENDINGS[status] ? status : answer.finish;
  const text = answer.error?.message ?? budget ?? ENDINGS[kind] ?? (status === "failed" ? "An error ended this answer." : "");
  if (!text) return null;
  return html`<p class="ending ${kind}" role="status">${text}</p>`;
}

const TOO_LONG = ["context_length_exceeded", "body_too_large"];

/** A refusal, with the time after which it is worth to ask again. */
export function Problem({ problem }) {
  useClock(problem?.until > Date.now());
  if (!problem) return null;
  const { error, until, again, edit } = problem;
  const wait = until ? seconds(until) : 0;
  const isGone = error.code === "conversation_not_found";
  return html`<div class="problem" role="alert">
    <p>${error.message}${isGone && " It may belong to another key."}</p>
    ${isGone
      ? html`<button onClick=${() => navigate("#/chat")}>New chat</button>`
      : edit && TOO_LONG.includes(error.code)
        ? html`<button onClick=${edit}>Edit</button>`
        : html`<button disabled=${wait > 0} onClick=${again}>${wait > 0 ? `Try again in ${wait} s` : "Try again"}</button>`}
  </div>`;
}

function Siblings({ chat, message, busy }) {
  const siblings = chat.tree.siblings(message);
  if (siblings.length < 2) return null;
  const at = siblings.indexOf(message);
  const show = (step) => chat.show(siblings[at + step].id);
  return html`<span class="siblings">
    <button class="plain icon" aria-label="Previous version" disabled=${busy || at === 0} onClick=${() => show(-1)}>${icon("left")}</button>
    <span aria-label="Version ${at + 1} of ${siblings.length}">${at + 1}/${siblings.length}</span>
    <button class="plain icon" aria-label="Next version" disabled=${busy || at === siblings.length - 1} onClick=${() => show(1)}>${icon("right")}</button>
  </span>`;
}

function Copy({ text }) {
  return html`<button class="plain icon" aria-label="Copy" title="Copy" onClick=${(event) => copyText(text, event.currentTarget)}>${icon("copy")}</button>`;
}

function AnswerFoot({ chat, item, busy }) {
  const message = item.messages.at(-1);
  const { answer, status } = message;
  if (status === "unsent") return null;
  const isLast = chat.path.at(-1) === message;
  const isCut = ["cancelled", "interrupted", "failed"].includes(status) || answer.finish === "length";
  const { usage } = answer;
  const model = answer.model ?? "";
  const cost = costUsd(model, usage);
  const createdAt = answer.createdAt ?? message.created_at;
  const tokens = usage && `${compact(usage.prompt_tokens)} in, ${compact(usage.completion_tokens)} out`;
  const facts = [model, createdAt && dateTime(createdAt), tokens, cost > 0 && money(cost)];
  return html`<div class="foot">
    <${Siblings} chat=${chat} message=${item.head} busy=${busy} />
    <${Copy} text=${item.messages.map((part) => part.answer.text).join("")} />
    <button class="plain icon" aria-label="Regenerate" title="Another answer" disabled=${busy} onClick=${() => chat.regenerate(item.head)}>${icon("again")}</button>
    ${isLast && isCut && answer.text && html`<button class="plain" disabled=${busy} onClick=${() => chat.continue(message)}>${icon("go")} Continue</button>`}
    <span class="facts">${facts.filter(Boolean).join(" · ")}</span>
  </div>`;
}
