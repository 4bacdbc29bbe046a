"""The OpenAPI 3.1 document that `/openapi.json` serves, made of the tables that requests are checked by.

`scripts/docs` writes it to app/api/openapi.json. A contract test holds it against the routes of the
application and against those tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import orjson

from app.api.app import HEALTH_PATHS, MODEL_INFO_PATHS, SERVER_INFO_PATHS
from app.api.openai.listing import DEFAULT_LIMIT, MAX_LIMIT
from app.api.routes.conversations import MAX_QUERY
from app.errors import CODES
from app.intake.head import PLAIN_EVENTS, PLAIN_VALUES
from app.routing.router import Size
from app.safety.categories import CODE_OF
from app.safety.verdict import ACTIONS, STAGES
from app.store.export import FORMATS
from scripts.api_document import schemas

Schema = dict[str, Any]
Access = Literal["public", "chat", "admin"]
JSON = "application/json"
EVENTS = "text/event-stream"
VERSION = "0"
"""The version in the file; the server writes its own in this place."""


class Operation(NamedTuple):
    """A method of a route: what it is for, who may call it, what it takes and answers."""

    summary: str
    access: Access = "chat"
    body: str | None = None
    """The name of its schema in the document's components."""
    body_required: bool = True
    query: tuple[str, ...] = ()
    """Names in QUERY."""
    headers: tuple[str, ...] = ()
    """Names in HEADERS."""
    status: int = 200
    media: tuple[str, ...] = (JSON,)
    errors: tuple[int, ...] = ()
    """Statuses besides those that its access, its path and its body bring with them."""


_TEXT: Schema = {"type": "string"}
_EVENT_ID: Schema = {"type": "integer", "minimum": 0, "maximum": 10**15 - 1}
_DAY_OR_TIME: Schema = {"type": "string", "description": "A UTC day or time, as 2026-11-20T18:00Z."}
QUERY: Mapping[str, Schema] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
    "cursor": {"type": "string", "description": "The `next_cursor` of the page before."},
    "q": {"type": "string", "maxLength": MAX_QUERY},
    "format": {"enum": list(FORMATS), "default": "json"},
    "text": {"enum": ["true", "false"], "default": "false"},
    "period": {"type": "string", "description": "A UTC month or day, as 2026-11 or 2026-11-20."},
    "group_by": {
        "type": "string",
        "description": "A comma list of day, model, owner, key and metadata.NAME.",
    },
    "from": _DAY_OR_TIME,
    "to": _DAY_OR_TIME,
    "key": _TEXT,
    "owner": _TEXT,
    "subject": {"enum": ["prompt", "answer"]},
    "stage": {"enum": list(STAGES)},
    "action": {"enum": list(ACTIONS)},
    "category": {"enum": [*CODE_OF, *CODE_OF.values()]},
    "request_id": _TEXT,
    "model": _TEXT,
    "policy_hash": _TEXT,
    "last_event_id": _EVENT_ID,
}
HEADERS: Mapping[str, Schema] = {
    "Idempotency-Key": {"type": "string", "minLength": 1, "maxLength": 255},
    "Last-Event-ID": _EVENT_ID,
    "x-route": {"enum": list(get_args(Size))},
    "x-no-degrade": {"enum": ["0", "1"]},
    "x-resume": {"enum": ["0", "1"]},
    PLAIN_EVENTS: {"enum": list(PLAIN_VALUES), "default": "0"},
}
BODIES: Mapping[str, Schema] = {
    "ChatRequest": schemas.chat_request(),
    "CompletionRequest": schemas.completion_request(),
    "ModerationRequest": schemas.moderation_request(),
    "TokenizeRequest": schemas.tokenize_request(),
    "DetokenizeRequest": schemas.detokenize_request(),
    "ImportedConversation": schemas.imported_conversation(),
    "NewTitle": schemas.new_title(),
    "NewKey": schemas.new_key(),
    "ChangedKey": schemas.changed_key(),
    "Rotation": schemas.rotation(),
    "SignIn": schemas.sign_in(),
}

_MODEL_INFO = Operation("The model, as SGLang's clients read it", errors=(404,))
_SERVER_INFO = Operation("Sizes of the server; to admins also its settings and load", errors=(404,))
_TOKENIZE = Operation("The token ids of texts or of a conversation", body="TokenizeRequest", errors=(404,))
_DETOKENIZE = Operation("The text of token ids", body="DetokenizeRequest", errors=(404,))
_READY = Operation("Whether requests can be served", "public", errors=(503,))
_CREATE = Operation(
    "Start a generation; attach to it by its Idempotency-Key",
    body="ChatRequest",
    headers=("Idempotency-Key", "Last-Event-ID", "x-route", "x-no-degrade", "x-resume", PLAIN_EVENTS),
    media=(JSON, EVENTS),
    errors=(404, 409, 410, 429, 503),
)
_ATTACH = Operation(
    "Attach to a stream after an event",
    query=("last_event_id",),
    headers=("Last-Event-ID", PLAIN_EVENTS),
    media=(EVENTS,),
    errors=(410,),
)
_RETRIEVE = _ATTACH._replace(
    summary="The stored answer, or its stream", media=(JSON, EVENTS), errors=(409, 410)
)
_CANCEL = Operation("Stop a generation")
_MODERATE = Operation("Classify texts", body="ModerationRequest", errors=(404, 429, 503))
_KEY = "/api/admin/keys/{id}"
_CONVERSATION = "/api/conversations/{id}"
_SAFETY_FILTERS = ("subject", "stage", "action", "category", "owner", "key", "request_id", "model")

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("GET", "/"): Operation("The web console", "public", media=("text/html", "text/plain")),
    ("GET", "/console/{version}/{path}"): Operation(
        "A file of the console", "public", media=("*/*",), errors=(404,)
    ),
    ("GET", "/openapi.json"): Operation("This document", "public"),
    ("GET", "/healthz"): Operation("Whether the process lives", "public"),
    **{("GET", path): _READY for path in HEALTH_PATHS},
    ("GET", "/version"): Operation("The version of this program", "public"),
    ("GET", "/api/sign-in"): Operation("How people sign in here", "public", errors=(403,)),
    ("POST", "/api/sign-in/oidc"): Operation(
        "A key for a code of the OpenID Connect issuer", "public", "SignIn", errors=(403, 404, 429, 503)
    ),
    ("GET", "/metrics"): Operation("Numbers for Prometheus", "admin", media=("text/plain",)),
    ("GET", "/api/models"): Operation("The models, with limits and prices"),
    ("GET", "/api/me"): Operation("Whom the server takes you for, and what your key may do"),
    ("GET", "/api/usage"): Operation(
        "What was used and what it cost", query=("period", "from", "to", "group_by", "owner", "key")
    ),
    ("GET", "/api/prefixes"): Operation(
        "Your system prompts in the prefix cache", query=("limit", "key", "text")
    ),
    ("GET", "/api/conversations"): Operation("List and search", query=("limit", "cursor", "q")),
    ("POST", "/api/conversations"): Operation(
        "Import a conversation", body="ImportedConversation", status=201
    ),
    ("GET", _CONVERSATION): Operation("A conversation with all its messages"),
    ("PATCH", _CONVERSATION): Operation("Rename it", body="NewTitle"),
    ("DELETE", _CONVERSATION): Operation("Hide it until it is restored or purged"),
    ("POST", _CONVERSATION + "/restore"): Operation("Undo the deletion"),
    ("GET", _CONVERSATION + "/export"): Operation(
        "A file", query=("format",), media=(JSON, "text/markdown"), errors=(413,)
    ),
    ("GET", "/api/admin/keys"): Operation("Every API key, without its secret", "admin"),
    ("POST", "/api/admin/keys"): Operation("Make a key, shown this once", "admin", "NewKey", status=201),
    ("PATCH", _KEY): Operation("Change what a key may do", "admin", "ChangedKey", errors=(409,)),
    ("DELETE", _KEY): Operation("Revoke a key", "admin"),
    ("POST", _KEY + "/rotate"): Operation(
        "Give a key a new secret", "admin", "Rotation", body_required=False, errors=(409,)
    ),
    ("GET", "/api/admin/safety"): Operation(
        "What the screens decided",
        "admin",
        query=("limit", "cursor", "from", "to", *_SAFETY_FILTERS, "policy_hash"),
    ),
    ("GET", "/api/admin/safety/report"): Operation(
        "What policies make of the server's own traffic",
        "admin",
        query=("period", "from", "to"),
        errors=(409,),
    ),
    ("GET", "/api/admin/live"): Operation("The load now, and of the last minutes", "admin"),
    ("GET", "/api/admin/requests"): Operation(
        "The live requests of all owners, and those that ended lately",
        "admin",
        query=("limit", "owner", "key"),
    ),
    ("POST", "/api/admin/requests/{id}/cancel"): Operation("Stop a live request of any owner", "admin"),
    ("POST", "/api/admin/safety/reload"): Operation("Take the policy file as it is", "admin", errors=(409,)),
    ("GET", "/api/admin/prefixes"): Operation(
        "The system prompts of all owners", "admin", query=("limit", "owner", "key", "text")
    ),
    ("GET", "/api/admin/abuse"): Operation("Keys to look at", "admin", query=("owner",)),
    ("POST", "/api/moderations"): _MODERATE,
    ("POST", "/v1/moderations"): _MODERATE,
    **{("POST", prefix + "/tokenize"): _TOKENIZE for prefix in ("", "/v1")},
    **{("POST", prefix + "/detokenize"): _DETOKENIZE for prefix in ("", "/v1")},
    **{("GET", path): _MODEL_INFO for path in MODEL_INFO_PATHS},
    **{("GET", path): _SERVER_INFO for path in SERVER_INFO_PATHS},
    ("GET", "/v1/models"): Operation("The models in OpenAI's shape"),
    ("GET", "/v1/models/{id}"): Operation("One model in OpenAI's shape"),
    ("POST", "/api/chat/completions"): _CREATE,
    ("GET", "/api/chat/completions/{id}"): _ATTACH,
    ("DELETE", "/api/chat/completions/{id}"): _CANCEL,
    ("POST", "/api/chat/completions/{id}/cancel"): _CANCEL,
    ("POST", "/v1/chat/completions"): _CREATE,
    ("GET", "/v1/chat/completions/{id}"): _RETRIEVE,
    ("DELETE", "/v1/chat/completions/{id}"): Operation("Stop and delete"),
    ("POST", "/v1/chat/completions/{id}/cancel"): _CANCEL,
    ("POST", "/v1/completions"): _CREATE._replace(
        summary="Go on from prompts without a template", body="CompletionRequest"
    ),
    ("GET", "/v1/completions/{id}"): _RETRIEVE,
    ("DELETE", "/v1/completions/{id}"): Operation("Stop and delete"),
    ("POST", "/v1/completions/{id}/cancel"): _CANCEL,
}
_STATUS_TEXTS = {
    400: "The request is wrong",
    401: "No valid key",
    403: "Not allowed",
    404: "Not there, or not yours",
    409: "Contradicts what the server has",
    410: "The events have left the memory",
    413: "The body is too large",
    429: "A limit of the key",
    431: "The headers are too large",
    500: "A fault of the server",
    503: "Not now; Retry-After says when",
}


def document() -> dict[str, Any]:
    """The OpenAPI document."""
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tokenring",
            "version": VERSION,
            "description": "OpenAI's chat API, with streams that can be picked up again.",
        },
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {
                **BODIES,
                "Message": schemas.MESSAGE,
                "ContentPart": schemas.CONTENT_PART,
                "Tool": schemas.TOOL,
                **{f"Error{status}": schemas.error(status) for status in _STATUS_TEXTS},
            },
            "responses": {f"Error{status}": _error_response(status) for status in _STATUS_TEXTS},
        },
    }


def _operation(method: str, path: str, operation: Operation) -> Schema:
    described: Schema = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "summary": operation.summary,
        "parameters": [*_parameters(path, operation)],
        "responses": _responses(path, operation),
    }
    if operation.access == "public":
        described["security"] = []
    if operation.access == "admin":
        described["description"] = "Needs an admin key."
    if operation.body is not None:
        content = {JSON: {"schema": {"$ref": f"#/components/schemas/{operation.body}"}}}
        described["requestBody"] = {"required": operation.body_required, "content": content}
    return described


def _parameters(path: str, operation: Operation) -> list[Schema]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    in_query = [{"name": name, "in": "query", "schema": QUERY[name]} for name in operation.query]
    in_header = [{"name": name, "in": "header", "schema": HEADERS[name]} for name in operation.headers]
    return [*in_path, *in_query, *in_header]


def _responses(path: str, operation: Operation) -> Schema:
    schema_of = {JSON: {"type": "object"}}
    content = {media: {"schema": schema_of.get(media, {"type": "string"})} for media in operation.media}
    responses: Schema = {str(operation.status): {"description": "Done", "content": content}}
    if EVENTS in operation.media:
        responses["204"] = {"description": "The stream has no further event"}
    if path in HEALTH_PATHS:
        content = {JSON: {"schema": {"type": "object"}}}
        responses["503"] = {"description": "Not ready, and why", "content": content}
    for status in sorted(_error_statuses(path, operation)):
        responses.setdefault(str(status), {"$ref": f"#/components/responses/Error{status}"})
    return responses


def _error_statuses(path: str, operation: Operation) -> set[int]:
    statuses = {400, 431, 500, *operation.errors}
    if operation.access != "public":
        statuses |= {401, 403, 429, 503}
    if "{id}" in path:
        statuses.add(404)
    if operation.body is not None:
        statuses.add(413)
    return statuses


def _error_response(status: int) -> Schema:
    assert any(code.status == status for code in CODES.values())
    content = {JSON: {"schema": {"$ref": f"#/components/schemas/Error{status}"}}}
    response: Schema = {"description": _STATUS_TEXTS[status], "content": content}
    if status == 503:
        response["headers"] = {"Retry-After": {"schema": {"type": "integer", "description": "seconds"}}}
    return response


def as_json() -> str:
    """The text of app/api/openapi.json, indented so that a change of the API can be read in a diff."""
    options = orjson.OPT_NON_STR_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps(document(), option=options).decode()
