// Signing in as a person: at an OpenID Connect issuer, by a code with PKCE, or at a proxy in front of the server.
import { getJson, sendJson } from "./api.js";
import { base64url, random } from "./random.js";
import { check, reason, signIn } from "./session.js";
import { read, write } from "./storage.js";
import { html, useEffect, useState } from "./ui.js";

const KEPT = "sign-in";

/** What the issuer sent the browser back with, once; the address is cleaned before anything else is done. */
let returned = takeReturned();

function takeReturned() {
  const query = new URLSearchParams(location.search);
  if (!query.has("state") || !(query.has("code") || query.has("error"))) return null;
  const begun = parsed(read(KEPT, { tab: true }));
  write(KEPT, null, { tab: true });
  history.replaceState(null, "", location.pathname + (begun?.hash ?? ""));
  window.dispatchEvent(new Event("popstate"));
  return { begun, query };
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

/** Exchange what the issuer sent for a key. Throws an Error for people. */
async function finish({ begun, query }) {
  if (begun === null || begun.state !== query.get("state")) {
    throw new Error("This sign-in did not begin in this tab; begin it again here.");
  }
  if (!query.has("code")) {
    const words = query.get("error_description") ?? query.get("error");
    throw new Error(`The sign-in was ended: ${words}`);
  }
  const { nonce, verifier, redirect_uri, remember } = begun;
  const { key } = await sendJson("POST", "/api/sign-in/oidc", { code: query.get("code"), nonce, verifier, redirect_uri });
  await signIn(key, { remember });
}

/** Send the browser to the issuer; what must be known when it returns stays in this tab. */
async function begin(oidc, remember) {
  const [state, nonce, verifier] = [random(), random(), random()];
  const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(verifier));
  const redirect_uri = location.origin + location.pathname;
  write(KEPT, JSON.stringify({ state, nonce, verifier, redirect_uri, remember, hash: location.hash }), { tab: true });
  const address = new URL(oidc.authorization_endpoint);
  const sent = { response_type: "code", client_id: oidc.client_id, redirect_uri, scope: oidc.scope, state, nonce };
  Object.assign(sent, { code_challenge: base64url(new Uint8Array(digest)), code_challenge_method: "S256" });
  for (const [name, value] of Object.entries(sent)) address.searchParams.set(name, value);
  location.assign(address);
}

/** Buttons of the ways to sign in besides a key; nothing where there are none. `remember()` says where a key is kept. */
export function SignInMethods({ remember }) {
  const [methods, setMethods] = useState(null);
  const [error, setError] = useState("");
  const [isBusy, setBusy] = useState(false);

  /** Do it, and show why it failed. */
  async function attempt(work) {
    setBusy(true);
    setError("");
    reason.value = "";
    try {
      await work();
    } catch (problem) {
      setError(problem.message);
    }
    setBusy(false);
  }

  useEffect(() => {
    getJson("/api/sign-in").then(setMethods, () => {});
    const answer = returned;
    returned = null;
    if (answer !== null) attempt(() => finish(answer));
  }, []);

  const oidc = methods?.oidc;
  const hint = !oidc ? "" : !oidc.authorization_endpoint ? "cannot be reached now" : !crypto.subtle ? "needs https://" : "";
  return html`<div class="sign-in-methods">
    <p class="error" role="alert">${error}</p>
    ${methods?.proxy_user && html`<button type="button" class="primary" disabled=${isBusy} onClick=${() => attempt(check)}>
      Continue as ${methods.proxy_user}</button>`}
    ${oidc && html`<button type="button" class="primary" disabled=${isBusy || hint !== ""}
      onClick=${() => attempt(() => begin(oidc, remember()))}>
      ${isBusy ? "Signing in…" : `Sign in with ${new URL(oidc.issuer).host}`}</button>`}
    ${oidc && hint && html`<p class="muted">${new URL(oidc.issuer).host} ${hint}</p>`}
    ${(oidc || methods?.proxy_user) && html`<p class="muted">or with an API key:</p>`}
  </div>`;
}
