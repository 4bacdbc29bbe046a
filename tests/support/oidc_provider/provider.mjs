// A certified OpenID Connect provider with its own sign-in pages, for tests: PORT, and where the browser returns to.
import Provider from "oidc-provider";

const [port, redirectUri] = process.argv.slice(2);
const people = { ann: { email: "ann@example.org", groups: ["ops"] }, "安妮": { email: "ann@example.org", groups: [] } };

const provider = new Provider(`http://127.0.0.1:${port}`, {
  clients: [{ client_id: "tokenring", client_secret: "secret", redirect_uris: [redirectUri] }],
  claims: { openid: ["sub"], email: ["email"], groups: ["groups"] },
  scopes: ["openid", "email", "groups"],
  pkce: { required: () => true },
  findAccount: (_context, id) => ({ accountId: id, claims: () => ({ sub: id, ...people[id] }) }),
});
provider.listen(Number(port), "127.0.0.1", () => console.log("ready"));
