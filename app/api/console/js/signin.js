// The form that asks for an API key.
import { explain } from "./api.js";
import { reason, signIn } from "./session.js";
import { SignInMethods } from "./sign-in-methods.js";
import { html, useEffect, useRef, useState } from "./ui.js";

/** The form; the address stays, so that the view that was asked for is shown after it. */
export function SignIn() {
  const [error, setError] = useState("");
  const [isBusy, setBusy] = useState(false);
  const field = useRef(null);
  const remember = useRef(null);
  useEffect(() => field.current.focus(), []);

  async function submit(event) {
    event.preventDefault();
    setBusy(true);
    setError("");
    try {
      await signIn(field.current.value, { remember: remember.current.checked });
    } catch (problem) {
      setError(explain(problem));
      setBusy(false);
      field.current.select();
    }
  }

  const problem = error || reason.value;
  return html`<main class="sign-in" id="main" tabindex="-1">
    <form class="card" onSubmit=${submit}>
      <h1>Tokenring</h1>
      <${SignInMethods} remember=${() => remember.current.checked} />
      <label for="key">API key</label>
      <input id="key" ref=${field} type="password" autocomplete="current-password" required spellcheck="false"
        autocapitalize="off" aria-describedby="key-help key-error" aria-invalid=${error ? "true" : null} />
      <p class="error" id="key-error" role="alert">${problem}</p>
      <label class="check"><input type="checkbox" ref=${remember} defaultChecked /> Remember it in this browser</label>
      <p class="muted">Otherwise it is forgotten with this tab.</p>
      <button class="primary" disabled=${isBusy}>${isBusy ? "Signing in…" : "Sign in"}</button>
      <p class="muted" id="key-help">No key yet? An administrator makes one: <code>tokenring keys create --name NAME</code></p>
    </form>
  </main>`;
}
