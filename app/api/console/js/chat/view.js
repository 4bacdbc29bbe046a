// The chat: its messages, and where the next is written.
import { bind } from "../shortcuts.js";
import { html, render, useEffect, useLayoutEffect, useRef, useSignal, useSignalEffect } from "../ui.js";
import { Announcer } from "./announce.js";
import { chatOf } from "./chats.js";
import { Composer } from "./composer.js";
import { copyText } from "./copy.js";
import { icon } from "./icons.js";
import { MessageList } from "./list.js";
import { Message, Problem } from "./message.js";
import { Panel } from "./panel.js";
import { currentModel, loadModels, settings } from "./settings.js";
import { items } from "./tree.js";

const BUILTIN = "tokenring-builtin";

export function ChatView({ conversationId }) {
  const chat = chatOf(conversationId);
  useEffect(() => void loadModels().catch(() => {}), []);
  return html`<${Chat} key=${chat.number} chat=${chat} />`;
}

function Chat({ chat }) {
  const list = useRef(null);
  const isAtEnd = useSignal(true);
  const spoken = useSignal("");
  useEffect(() => void chat.open(), [chat]);
  useEffect(() => bind("Escape", "Stop the answer", () => (chat.live.peek() ? chat.stop() : false)), [chat]);
  useAnnouncements(chat, spoken);

  const send = (content) => {
    const path = chat.path;
    const { system } = settings.peek();
    const first = path.length === 0 && system.trim() ? [{ role: "system", content: system }] : [];
    const parent = path.at(-1)?.status === "unsent" ? path.at(-1).asked.parent : path.at(-1)?.id ?? null;
    chat.send([...first, { role: "user", content }], parent);
    list.current.toEnd();
  };
  const onUp = () => chat.path.findLast(({ role }) => role === "user")?.edit?.();
  chat.changed.value;
  const isEmpty = chat.path.length === 0;
  const onDrop = (event) => {
    event.preventDefault();
    chat.takeFiles(event.dataTransfer.files);
  };
  return html`<section class="chat" aria-label="Chat" onDrop=${onDrop} onDragOver=${(event) => event.preventDefault()}>
    ${!isEmpty && html`<h1 class="visually-hidden">Chat</h1>`}
    <${Panel} chat=${chat} />
    <${Log} chat=${chat} list=${list} isAtEnd=${isAtEnd} />
    ${isEmpty && html`<div class="empty">${chat.problem.value ? html`<${Problem} problem=${chat.problem.value} />` : chat.loading.value ? "Reading the conversation…" : html`<h1>What would you like to know?</h1>
      <p class="muted">An answer survives a reload, a lost network and a restart of the server.</p>
      ${currentModel()?.id === BUILTIN && html`<p class="muted">This model is a toy: it knows Tokenring, and little else.</p>`}`}</div>`}
    ${!isAtEnd.value && html`<button class="to-end icon" aria-label="To the newest message" onClick=${() => list.current.toEnd()}>${icon("down")}</button>`}
    <${Composer} chat=${chat} send=${send} onUp=${onUp} />
    <div class="visually-hidden" aria-live="polite">${spoken.value}</div>
  </section>`;
}

function Log({ chat, list, isAtEnd }) {
  const scroller = useRef(null);
  const inner = useRef(null);
  useLayoutEffect(() => {
    const mount = (node, item) => render(html`<${Message} chat=${chat} item=${item} />`, node);
    const onFollow = (isFollowing) => (isAtEnd.value = isFollowing);
    list.current = new MessageList(scroller.current, inner.current, mount, (node) => render(null, node), onFollow);
    return () => list.current.close();
  }, [chat]);
  useSignalEffect(() => {
    chat.changed.value;
    list.current.set(items(chat.path));
  });
  return html`<div class="scroller" ref=${scroller} tabindex="0" onClick=${copyCode}><div class="log" role="log" aria-live="off" aria-label="Messages" ref=${inner}></div></div>`;
}

function copyCode({ target }) {
  const button = target.closest("[data-copy]");
  if (button) copyText(button.closest("figure").querySelector("code").textContent, button);
}

function useAnnouncements(chat, spoken) {
  const announcer = useRef(new Announcer((text) => (spoken.value = text)));
  const heard = useRef(null);
  useSignalEffect(() => {
    const live = chat.live.value;
    const message = live?.message ?? heard.current;
    if (!message) return;
    message.tick.value;
    if (message !== heard.current) announcer.current.start(message.answer.text.length);
    announcer.current.hear(message.answer.text, live === null);
    heard.current = live && message;
  });
}
