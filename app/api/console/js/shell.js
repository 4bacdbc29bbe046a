// The frame around the views: top, side bar with the conversations, what the server is doing.
import { AdminView } from "./admin/view.js";
import { ChatView } from "./chat/view.js";
import { Help, isHelpOpen } from "./help.js";
import { ConversationList } from "./lists/conversations.js";
import { UsageView } from "./lists/usage.js";
import { Notices } from "./notices.js";
import { navigate, route } from "./router.js";
import { server } from "./server.js";
import { me, session, signOut } from "./session.js";
import { bind } from "./shortcuts.js";
import { SignIn } from "./signin.js";
import { setTheme, theme, THEMES } from "./theme.js";
import { html, signal, useEffect, useErrorBoundary, useRef } from "./ui.js";

const VIEWS = {
  chat: { title: "Chat", view: () => html`<${ChatView} conversationId=${route.value.id} />` },
  usage: { title: "Usage", view: () => html`<${UsageView} />` },
  admin: { title: "Admin", view: () => html`<${AdminView} />`, isAdmins: true },
};

/** Whether the side bar is open: over the page where that is narrow, beside it elsewhere. */
export const isSideOpen = signal(!isNarrow());

function isNarrow() {
  return matchMedia("(max-width: 800px)").matches;
}

const isVisible = (entry) => !entry.isAdmins || me.value?.scope === "admin";

function ServerBanner() {
  const { state, text } = server.value;
  const words = {
    away: "The server cannot be reached. This page tries again by itself.",
    offline: "This device is offline. This page goes on by itself once it is back.",
    waiting: `The server takes no requests yet: ${text}. This page goes on by itself.`,
  };
  return html`<div class="banner ${state}" role="status">${words[state] ?? ""}</div>`;
}

function Top() {
  return html`<header class="top">
    <button class="plain icon" aria-expanded=${String(isSideOpen.value)} aria-controls="side"
      aria-label="Conversations" onClick=${() => (isSideOpen.value = !isSideOpen.value)}>☰</button>
    <span class="brand">Tokenring</span>
    <nav aria-label="Pages">
      ${Object.entries(VIEWS).filter(([, entry]) => isVisible(entry)).map(([name, { title }]) => html`
        <a href="#/${name}" aria-current=${route.value.name === name ? "page" : null}>${title}</a>`)}
    </nav>
    <${Account} />
  </header>`;
}

function Account() {
  const key = me.value?.key;
  return html`<details class="menu">
    <summary aria-label="Settings">⋮</summary>
    <div class="card">
      <p>${key ? html`Key <b>${key.name}</b>` : "No key is needed here"}<br /><span class="muted">${me.value?.owner}</span></p>
      <label>Theme${" "}
        <select value=${theme.value} onChange=${(event) => setTheme(event.target.value)}>
          ${THEMES.map((name) => html`<option value=${name}>${name}</option>`)}
        </select>
      </label>
      <button onClick=${() => (isHelpOpen.value = true)}>Keyboard and help</button>
      ${!me.value?.open && html`<button onClick=${signOut}>Sign out</button>`}
    </div>
  </details>`;
}

function Side() {
  const close = () => isNarrow() && (isSideOpen.value = false);
  return html`<aside id="side" class="side" aria-label="Conversations" inert=${!isSideOpen.value}
    onClick=${(event) => event.target.closest("a") && close()}>
    <a class="button" href="#/chat">New chat</a>
    <${ConversationList} />
  </aside>
  ${isSideOpen.value && html`<div class="backdrop" onClick=${close}></div>`}`;
}

function Broken({ error, retry }) {
  return html`<div class="card" role="alert">
    <h1>This view failed</h1>
    <p>${error.message}</p>
    <button onClick=${retry}>Show it again</button>
  </div>`;
}

function View() {
  const entry = VIEWS[route.value.name];
  const [error, retry] = useErrorBoundary((problem) => console.error(problem));
  if (error) return html`<${Broken} error=${error} retry=${retry} />`;
  if (!isVisible(entry)) return html`<div class="card"><h1>${entry.title}</h1><p>This page needs an admin key. Sign in with such a key to see it.</p></div>`;
  return entry.view();
}

function useShortcuts() {
  useEffect(() => {
    const unbind = [
      bind("Ctrl+/", "Show this help", () => (isHelpOpen.value = true)),
      bind("Ctrl+Shift+O", "New chat", () => navigate("#/chat")),
      bind("Ctrl+Shift+S", "Show or hide the conversations", () => (isSideOpen.value = !isSideOpen.value)),
      bind("Escape", "Close what lies over the page", () => isNarrow() && isSideOpen.value && (isSideOpen.value = false)),
    ];
    return () => unbind.forEach((remove) => remove());
  }, []);
}

/** The view's name becomes the title, and its content gets the focus when it is another one. */
function useTitle(main) {
  const shown = useRef(null);
  const { name } = route.value;
  useEffect(() => {
    document.title = `${VIEWS[name].title} · Tokenring`;
    if (shown.current !== null && shown.current !== name) main.current.focus();
    shown.current = name;
  }, [name]);
}

function Frame() {
  const main = useRef(null);
  useShortcuts();
  useTitle(main);
  return html`
    <button class="skip" onClick=${() => main.current.focus()}>Skip to the content</button>
    <${Top} />
    <div class="columns">
      <${Side} />
      <main id="main" ref=${main} tabindex="-1"><${View} key=${route.value.name} /></main>
    </div>
    <${Help} />`;
}

/** The whole console. */
export function Shell() {
  return html`<${ServerBanner} />
    ${session.value === "signed-in" && html`<${Frame} />`}
    ${session.value === "signed-out" && html`<${SignIn} />`}
    ${session.value === "checking" && html`<main class="sign-in" id="main"><p class="muted">Asking the server…</p></main>`}
    <${Notices} />`;
}
