// The page of administrators. Not built yet.
import { html } from "../ui.js";

export function AdminView() {
  return html`<div class="page"><h1>Admin</h1></div>`;
}
