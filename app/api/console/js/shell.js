// The frame around the views: top, side bar with the conversations, what the server is doing.
import { AdminView } from "./admin/view.js";
import { ChatView } from "./chat/view.js";
import { Help, isHelpOpen } from "./help.js";
import { ConversationList } from "./lists/conversations.js";
import { UsageView } from "./lists/usage.js";
import { Notices } from "./notices.js";
import { navigate, route } from "./router.js";
import { inWords, server } from "./server.js";
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
const LOGO = new URL("../favicon.svg", import.meta.url).href;
const STATES = {
  away: () => "The server cannot be reached. This page tries again by itself.",
  offline: () => "This device is offline. This page goes on by itself once it is back.",
  waiting: inWords,
};

const narrow = matchMedia("(max-width: 800px)");
const isNarrow = signal(narrow.matches);
/** Whether the side bar is there: beside the page, or over it where that is narrow. */
const isSideOpen = signal(!narrow.matches);
narrow.addEventListener("change", () => {
  isNarrow.value = narrow.matches;
  isSideOpen.value = !narrow.matches;
});

const isVisible = (entry) => !entry.isAdmins || me.value?.scope === "admin";

function ServerBanner() {
  const { state, text } = server.value;
  return html`<div class="banner ${state}" role="status">${STATES[state]?.(text)}</div>`;
}

function Top() {
  const entries = Object.entries(VIEWS).filter(([, entry]) => isVisible(entry));
  return html`<header class="top">
    <button id="side-button" class="plain icon" aria-expanded=${String(isSideOpen.value)} aria-controls="side"
      aria-label="Conversations" onClick=${() => (isSideOpen.value = !isSideOpen.value)}>☰</button>
    <span class="brand"><img src=${LOGO} alt="" width="20" height="20" /> Tokenring</span>
    <nav aria-label="Pages">${entries.map(([name, { title }]) => html`
      <a href="#/${name}" aria-current=${route.value.name === name ? "page" : null}>${title}</a>`)}
    </nav>
    <button class="plain icon" popovertarget="menu" aria-label="Menu">⋮</button>
    <${Menu} />
  </header>`;
}

function Menu() {
  const menu = useRef(null);
  const { key, owner, open } = me.value;
  const does = (act) => () => {
    menu.current.hidePopover();
    act();
  };
  return html`<div id="menu" ref=${menu} class="menu card" popover>
    <p>${key ? html`Signed in with the key <b>${key.name}</b>` : open ? "This server needs no key." : "Signed in with the server's own key"}
      ${key && key.name !== owner && html`<br /><span class="muted">Owner: ${owner}</span>`}</p>
    <label>Theme${" "}
      <select value=${theme.value} onChange=${(event) => setTheme(event.target.value)}>
        ${Object.entries(THEMES).map(([name, label]) => html`<option value=${name}>${label}</option>`)}
      </select>
    </label>
    <button onClick=${does(() => (isHelpOpen.value = true))}>Keyboard and version</button>
    ${!open && html`<button onClick=${does(signOut)}>Sign out</button>`}
  </div>`;
}

function closeSide() {
  if (!isNarrow.peek() || !isSideOpen.peek()) return false;
  isSideOpen.value = false;
  document.getElementById("side-button").focus();
  return true;
}

function Side() {
  const side = useRef(null);
  const isOver = isNarrow.value && isSideOpen.value;
  useEffect(() => {
    if (isOver) side.current.querySelector("a, button, input").focus();
  }, [isOver]);
  return html`<aside id="side" ref=${side} class="side" aria-label="Conversations" inert=${!isSideOpen.value}
    onClick=${(event) => event.target.closest("a") && closeSide()}>
    <div class="side-top">
      <a class="button" href="#/chat">New chat</a>
      ${isOver && html`<button class="plain icon" aria-label="Close the conversations" onClick=${closeSide}>×</button>`}
    </div>
    <${ConversationList} />
  </aside>
  ${isOver && html`<div class="backdrop" onClick=${closeSide}></div>`}`;
}

function View() {
  const entry = VIEWS[route.value.name];
  const [error, retry] = useErrorBoundary((problem) => console.error(problem));
  if (error) {
    return html`<div class="page" role="alert"><h1>This view failed</h1><p>${error.message}</p><button onClick=${retry}>Show it again</button></div>`;
  }
  if (!isVisible(entry)) {
    return html`<div class="page"><h1>${entry.title}</h1><p>This page needs an admin key. Sign out, and sign in with such a key.</p></div>`;
  }
  return entry.view();
}

function useShortcuts() {
  useEffect(() => {
    const unbind = [
      bind("Ctrl+/", "Show this help", () => (isHelpOpen.value = true)),
      bind("Ctrl+Shift+O", "New chat", () => navigate("#/chat")),
      bind("Ctrl+Shift+S", "Show or hide the conversations", () => (isSideOpen.value = !isSideOpen.value)),
      bind("Escape", "Close what lies over the page", closeSide),
    ];
    return () => unbind.forEach((remove) => remove());
  }, []);
}

/** The view's name is the page's title; another view gets the focus, and the first one after the sign-in. */
function useTitle(main) {
  const { name } = route.value;
  const shown = useRef(document.activeElement === document.body ? null : "sign-in");
  useEffect(() => {
    document.title = `${VIEWS[name].title} · Tokenring`;
    if (shown.current !== null && shown.current !== name && !main.current.contains(document.activeElement)) main.current.focus();
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
      <main id="main" ref=${main} tabindex="-1" inert=${isNarrow.value && isSideOpen.value}><${View} key=${route.value.name} /></main>
    </div>
    <${Help} />`;
}

/** The whole console. */
export function Shell() {
  return html`<${ServerBanner} />
    ${session.value === "signed-in" && html`<${Frame} />`}
    ${session.value === "signed-out" && html`<${SignIn} />`}
    ${session.value === "checking" && html`<main class="sign-in"><h1 class="muted">Tokenring</h1></main>`}
    <${Notices} />`;
}
