// Random texts, on pages without TLS too: `crypto.randomUUID` is missing there.
export function random() {
  return base64url(crypto.getRandomValues(new Uint8Array(32)));
}

export function base64url(bytes) {
  return btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}
