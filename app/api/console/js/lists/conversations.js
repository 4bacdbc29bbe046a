// The list of conversations. Not built yet.
import { html } from "../ui.js";

export function ConversationList() {
  return html`<p class="muted">No conversations.</p>`;
}
