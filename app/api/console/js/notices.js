// Short messages in a corner, read out by screen readers; also the place of "Undo".
import { route } from "./router.js";
import { effect, html, signal } from "./ui.js";

const notices = signal([]);
const timers = new Map();
let numNotices = 0;

/**
 * Show a message. `kind` is "info", "ok" or "error"; `action` is `{label, run}`. It leaves after `seconds`, and
 * without an action when another page is opened. Returns a function that closes it.
 */
export function notify(text, { kind = "info", action = null, seconds = action ? 12 : kind === "error" ? 10 : 6 } = {}) {
  numNotices += 1;
  const notice = { id: numNotices, text, kind, action, seconds };
  notices.value = [...notices.value.slice(-2), notice];
  start(notice);
  return () => close(notice.id);
}

function close(id) {
  stop(id);
  notices.value = notices.value.filter((notice) => notice.id !== id);
}

function start(notice) {
  timers.set(notice.id, setTimeout(close, notice.seconds * 1000, notice.id));
}

function stop(id) {
  clearTimeout(timers.get(id));
  timers.delete(id);
}

effect(() => {
  route.value;
  for (const { id, action } of notices.peek()) if (!action) close(id);
});

function Notice({ notice }) {
  const act = () => {
    close(notice.id);
    notice.action.run();
  };
  return html`<div class="notice ${notice.kind}" role=${notice.kind === "error" ? "alert" : null}
    onMouseEnter=${() => stop(notice.id)} onMouseLeave=${() => start(notice)}
    onFocusIn=${() => stop(notice.id)} onFocusOut=${() => start(notice)}>
    <span>${notice.text}</span>
    ${notice.action && html`<button type="button" onClick=${act}>${notice.action.label}</button>`}
    <button type="button" class="plain" aria-label="Close this message" onClick=${() => close(notice.id)}>×</button>
  </div>`;
}

/** The messages, newest last. */
export function Notices() {
  return html`<section class="notices" aria-label="Messages" aria-live="polite">
    ${notices.value.map((notice) => html`<${Notice} key=${notice.id} notice=${notice} />`)}
  </section>`;
}
