"""The OpenID Connect issuer where people sign in: the exchange of a code for the claims about a person.

The console has begun the sign-in: it made the state, the nonce and the PKCE verifier, and keeps them. This
server asks the issuer, and believes only what the issuer has signed with a key of its own, for this server,
for this nonce, and not yet expired. PyJWT checks signatures; it is imported where an issuer is set.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, urlsplit

import aiohttp
import orjson

from app.core import Scope
from app.errors import IssuerUnavailable, SignInRefused
from app.settings import Settings, SettingsError

if TYPE_CHECKING:
    import jwt

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Public keys only: with HS256 the issuer's public key would be a secret that everybody has."""
LEEWAY_S = 60.0
"""Seconds by which the clocks may differ."""
TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 1024**2
CACHED_S = 600.0
"""Seconds for which the issuer's metadata and keys are kept; an unknown key is asked for at once."""
FAILED_S = 5.0
"""Seconds without another attempt where the issuer could not be reached."""


class Claim(NamedTuple):
    """A claim that a setting asks for, as `groups=staff`."""

    name: str
    value: str

    def holds(self, claims: Mapping[str, Any]) -> bool:
        """True if the claim is this value, or a list with it. Booleans and numbers are compared as JSON."""
        claim = claims.get(self.name)
        values = claim if isinstance(claim, list) else [] if claim is None else [claim]
        return any(self.value == (v if isinstance(v, str) else json.dumps(v)) for v in values)


class Cached(NamedTuple):
    """A document of the issuer; None where it could not be fetched."""

    document: Mapping[str, Any] | None
    until_s: float


class Issuer:
    """One issuer, and this server as a client of it."""

    def __init__(self, settings: Settings, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Raise SettingsError: what is set cannot work."""
        self.url, self.client_id = settings.oidc_issuer, settings.oidc_client_id
        self.scope = settings.oidc_scope
        self._require = claim_of("oidc_require", settings.oidc_require)
        self._admin = claim_of("oidc_admin", settings.oidc_admin)
        self._secret = settings.oidc_client_secret
        self._clock_s = clock_s
        self._documents: dict[str, Cached] = {}
        self._lock = asyncio.Lock()
        if not self.client_id:
            raise SettingsError("oidc_issuer: set oidc_client_id too: the id of this server at the issuer")
        if not is_protected(self.url):
            raise SettingsError(f"oidc_issuer: expected an https:// URL, got {self.url!r}")
        try:
            import jwt  # noqa: F401
            from cryptography.hazmat.primitives.asymmetric import rsa  # noqa: F401
        except ImportError as exc:
            raise SettingsError(f"oidc_issuer: needs `pip install 'tokenring[oidc]'` ({exc})") from exc

    async def metadata(self) -> Mapping[str, Any]:
        """What the issuer says of itself. Raises IssuerUnavailable."""
        document = await self._document(f"{self.url.rstrip('/')}/.well-known/openid-configuration")
        if document.get("issuer") != self.url:
            raise self._unavailable(f"it calls itself {document.get('issuer')!r}; set oidc_issuer so")
        for name in ("authorization_endpoint", "token_endpoint", "jwks_uri"):
            if not is_protected(document.get(name)):
                raise self._unavailable(f"its {name} is no https:// URL")
        return document

    async def claims_of(self, code: str, verifier: str, nonce: str, redirect_uri: str) -> Mapping[str, Any]:
        """The claims about the person who has the code. Raises SignInRefused, IssuerUnavailable."""
        metadata = await self.metadata()
        tokens = await self._exchange(metadata, code, verifier, redirect_uri)
        claims = await self._verified(metadata, tokens.get("id_token"), nonce)
        if not is_protected(metadata.get("userinfo_endpoint")) or not isinstance(
            tokens.get("access_token"), str
        ):
            return claims
        headers = {"Authorization": f"Bearer {tokens['access_token']}"}
        status, info = await self._fetch("GET", metadata["userinfo_endpoint"], headers=headers)
        if status != 200:
            raise self._unavailable(f"its user info endpoint answered {status}")
        if info.get("sub") != claims["sub"]:  # OpenID Connect Core, section 5.3.2
            raise SignInRefused("The issuer's user info is not of the person who signed in; begin again.")
        return {**info, **claims}

    def check_allowed(self, claims: Mapping[str, Any]) -> None:
        """Raise SignInRefused for a person without the claim that `oidc_require` asks for."""
        if self._require is not None and not self._require.holds(claims):
            raise SignInRefused(
                f"This server is for people with the claim {self._require.name}={self._require.value}."
            )

    def scope_of(self, claims: Mapping[str, Any]) -> Scope | None:
        """The scope of the person's key; None where the issuer does not decide it."""
        if self._admin is None:
            return None
        return "admin" if self._admin.holds(claims) else "chat"

    async def _exchange(
        self, metadata: Mapping[str, Any], code: str, verifier: str, redirect_uri: str
    ) -> Mapping[str, Any]:
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect_uri,
            "code_verifier": verifier,
        }
        headers = {}
        methods = metadata.get("token_endpoint_auth_methods_supported")
        if self._secret and (not isinstance(methods, list) or "client_secret_basic" in methods):
            pair = (
                f"{quote(self.client_id, safe='')}:{quote(self._secret, safe='')}"  # RFC 6749, section 2.3.1
            )
            headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        else:
            form["client_id"] = self.client_id
            if self._secret:
                form["client_secret"] = self._secret
        status, answer = await self._fetch("POST", metadata["token_endpoint"], data=form, headers=headers)
        if status == 200:
            return answer
        if answer.get("error") == "invalid_client":
            raise self._unavailable("it does not accept oidc_client_id with oidc_client_secret")
        if 400 <= status < 500:
            raise SignInRefused("The issuer refuses the code: it was used or is too old; sign in again.")
        raise self._unavailable(f"its token endpoint answered {status}")

    async def _verified(self, metadata: Mapping[str, Any], token: object, nonce: str) -> dict[str, Any]:
        """The claims of an id token. Raises SignInRefused."""
        import jwt

        if not isinstance(token, str):
            raise SignInRefused("The issuer gave no id_token; oidc_scope must have `openid`.")
        try:
            key = await self._signing_key(metadata["jwks_uri"], jwt.get_unverified_header(token))
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=list(ALGORITHMS),
                audience=self.client_id,
                issuer=self.url,
                leeway=LEEWAY_S,
                options={"require": ["iss", "sub", "aud", "exp", "iat"]},
            )
        except jwt.PyJWTError as exc:
            raise SignInRefused(
                f"The issuer's token is wrong ({type(exc).__name__}); sign in again."
            ) from exc
        parties = claims.get("azp", self.client_id)
        several = isinstance(claims["aud"], list) and len(claims["aud"]) > 1
        if parties != self.client_id or (several and "azp" not in claims):
            raise SignInRefused("The issuer's token is of another client; sign in again.")
        if not hmac.compare_digest(str(claims.get("nonce", "")).encode(), nonce.encode()):
            raise SignInRefused("The issuer's token is of another sign-in (nonce); sign in again.")
        if not claims["sub"]:
            raise SignInRefused("The issuer's token names nobody.")
        return claims

    async def _signing_key(self, url: str, header: Mapping[str, Any]) -> jwt.PyJWK:
        """The issuer's key that a token names. Raises SignInRefused, IssuerUnavailable."""
        kid = header.get("kid")
        for fresh in (False, True):
            keys = [key for key in _keys(await self._document(url, fresh=fresh)) if kid in (None, key.key_id)]
            if len(keys) == 1:
                return keys[0]
        raise SignInRefused("The issuer's token is signed by none of its keys; sign in again.")

    async def _document(self, url: str, *, fresh: bool = False) -> Mapping[str, Any]:
        """A document of the issuer, from memory where that is new enough. Raises IssuerUnavailable."""
        async with self._lock:
            cached = self._documents.get(url)
            if cached is None or fresh or self._clock_s() >= cached.until_s:
                document = await self._try_fetch(url)
                kept_s = FAILED_S if document is None else CACHED_S
                cached = self._documents[url] = Cached(document, self._clock_s() + kept_s)
        if cached.document is None:
            raise self._unavailable("it does not answer")
        return cached.document

    async def _try_fetch(self, url: str) -> Mapping[str, Any] | None:
        try:
            status, document = await self._fetch("GET", url)
        except IssuerUnavailable:
            return None
        return document if status == 200 else None

    async def _fetch(self, method: str, url: str, **options: Any) -> tuple[int, dict[str, Any]]:
        """The status and the JSON object of an answer. Raises IssuerUnavailable."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, trust_env=True) as session,
                session.request(method, url, allow_redirects=False, **options) as response,
            ):
                raw = b""
                async for chunk in response.content.iter_chunked(MAX_ANSWER_BYTES):
                    raw += chunk
                    if len(raw) > MAX_ANSWER_BYTES:
                        raise self._unavailable("its answer is too long")
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise self._unavailable(type(exc).__name__) from exc
        try:
            document = orjson.loads(raw)
        except orjson.JSONDecodeError:
            document = None
        return response.status, document if isinstance(document, dict) else {}

    def _unavailable(self, reason: str) -> IssuerUnavailable:
        return IssuerUnavailable(
            f"The issuer {self.url} cannot be used ({reason}). Keys work all the same; try again."
        )


def _keys(document: Mapping[str, Any]) -> list[jwt.PyJWK]:
    """The keys of a key set that sign; none where it has none."""
    import jwt

    try:
        keys = jwt.PyJWKSet.from_dict(dict(document)).keys
    except jwt.PyJWTError:
        return []
    return [key for key in keys if key.public_key_use in (None, "sig")]


def claim_of(setting: str, text: str) -> Claim | None:
    """The claim of a setting; None where it is empty. Raises SettingsError."""
    name, equals, value = text.partition("=")
    if text and not (name and equals and value):
        raise SettingsError(f"{setting}: expected a claim and its value as groups=staff, got {text!r}")
    return Claim(name, value) if text else None


def is_protected(url: object) -> bool:
    """True for a URL with TLS, or of this machine."""
    if not isinstance(url, str):
        return False
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return False
    return bool(host) and (parts.scheme == "https" or (parts.scheme == "http" and host in LOOPBACK))


LOOPBACK = ("127.0.0.1", "::1", "localhost")
