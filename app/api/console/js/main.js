// Starts the console: draws it, watches the server, and signs in with the key that is kept.
import { server, watch } from "./server.js";
import { check, session } from "./session.js";
import { Shell } from "./shell.js";
import { effect, html, render } from "./ui.js";

const RETRY_MS = 2000;

render(html`<${Shell} />`, document.getElementById("app"));
watch();

/** A server that starts, or is away, says later whom it takes us for. */
async function ask() {
  if (session.peek() !== "checking") return;
  await check().catch(() => setTimeout(ask, RETRY_MS));
}

effect(() => {
  if (server.value.state !== "unknown") ask();
});
