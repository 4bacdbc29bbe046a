// The chat. Not built yet.
import { html } from "../ui.js";

export function ChatView({ conversationId }) {
  return html`<div class="page"><h1>Chat</h1><p class="muted">${conversationId ?? "New chat"}</p></div>`;
}
