// Starts the console: draws it, watches the server, and signs in with the key that is kept.
import { check, session } from "./session.js";
import { server, watch } from "./server.js";
import { Shell } from "./shell.js";
import { effect, html, render } from "./ui.js";

render(html`<${Shell} />`, document.getElementById("app"));
watch();

// A server that starts, or is away, says later who we are: ask again each time its state changes.
effect(() => {
  if (server.value.state !== "unknown" && session.value === "checking") check().catch(() => setTimeout(retry, 2000));
});

function retry() {
  if (session.peek() === "checking") check().catch(() => setTimeout(retry, 2000));
}
