"""Tools, and questions that call for them: the model picks the function and copies its arguments."""

# ruff: noqa: E501 -- long lines of text

from __future__ import annotations

import json
from random import Random
from typing import Any

_CITIES = ("Paris", "Berlin", "Oslo", "Lima", "Tokyo", "Boston", "Cairo", "Madrid", "London", "New York", "Rome",
           "San Francisco", "Vienna", "Sydney", "Beijing", "Munich", "Toronto", "Seoul", "Delhi", "Zurich", "Lyon",
           "Lisbon", "Dublin", "Prague", "Chicago", "Austin", "Warsaw", "Athens", "Hanoi", "Bogota")  # fmt: skip
_QUERIES = ("red shoes", "cheap flights", "the capital of peru", "python tutorials", "tokenring", "pasta recipes",
            "climate news", "used bicycles", "jazz concerts", "weather radar", "tax forms", "electric cars",
            "sglang", "hiking trails", "open jobs", "coffee machines")  # fmt: skip
_WEATHER = (
    "What's the weather in {x}?", "what is the weather like in {x}", "How is the weather in {x} today?",
    "Is it raining in {x}?", "Weather in {x}?", "will it be warm in {x} tomorrow?", "how cold is it in {x}",
    "Tell me the temperature in {x}.", "Do I need an umbrella in {x}?", "weather {x}", "What is the forecast for {x}?",
)  # fmt: skip
_SEARCH = (
    "Search for {x}", "Look up {x}", "search the web for {x}", "find {x}", "Can you search for {x}?", "google {x}",
    "Please look up {x} for me.", "i need information on {x}", "What can you find about {x}?",
)  # fmt: skip
_CALCULATE = (
    "What is {x}?",
    "calculate {x}",
    "Compute {x}",
    "how much is {x}",
    "{x} = ?",
    "work out {x} please",
)
_TIME = ("What time is it in {x}?", "time in {x}?", "Tell me the local time in {x}.", "how late is it in {x}")
_NAMES = {
    "weather": (
        "get_weather",
        "get_current_weather",
        "weather",
        "lookup_weather",
        "current_weather",
        "getWeather",
    ),
    "search": ("search", "web_search", "search_web", "find_documents", "lookup"),
    "calculate": ("calculate", "calculator", "compute", "evaluate_expression"),
    "time": ("get_time", "current_time", "local_time", "get_current_time"),
}
_FIELDS = {
    "weather": ("city", "location", "place"),
    "search": ("query", "q", "text"),
    "calculate": ("expression", "formula"),
    "time": ("city", "location", "place"),
}
_ABOUT = {
    "weather": (
        "Get the weather",
        "Get the current weather for a city",
        "Current weather in a given location",
        "",
    ),
    "search": ("Search the web", "Search documents", "Find information", ""),
    "calculate": ("Evaluate an arithmetic expression", "Do arithmetic", "Calculator", ""),
    "time": ("Get the local time of a city", "Current time in a place", "Tells the time", ""),
}


def draw_tools(rng: Random) -> tuple[dict[str, Any], ...]:
    """One to three function definitions, in OpenAI's shape."""
    kinds = rng.sample(sorted(_NAMES), k=rng.choice((1, 1, 1, 2, 3)))
    return tuple(_tool(kind, rng) for kind in kinds)


def _tool(kind: str, rng: Random) -> dict[str, Any]:
    field = rng.choice(_FIELDS[kind])
    function: dict[str, Any] = {"name": rng.choice(_NAMES[kind])}
    about = rng.choice(_ABOUT[kind])
    if about:
        function["description"] = about
    function["parameters"] = {
        "type": "object",
        "properties": {field: {"type": "string"}},
        "required": [field],
    }
    if rng.random() < 0.3:
        function["parameters"]["additionalProperties"] = False
        function["strict"] = True
    return {"type": "function", "function": function}


def draw_call(rng: Random, tools: tuple[dict[str, Any], ...]) -> tuple[str, str, dict[str, str], str, str]:
    """A question for one of the tools: question, name, arguments, the tool's result, the reply to it."""
    function = rng.choice(tools)["function"]
    kind = next(kind for kind, names in _NAMES.items() if function["name"] in names)
    (field,) = function["parameters"]["properties"]
    question, value, result, reply = _ASKERS[kind](rng)
    return question, function["name"], {field: value}, result, reply


def _weather(rng: Random) -> tuple[str, str, str, str]:
    city, degrees = _place(rng), rng.randint(-9, 38)
    sky = rng.choice(("sunny", "rainy", "cloudy", "windy", "clear", "foggy"))
    result = rng.choice((json.dumps({"temperature": degrees, "condition": sky}), f"{degrees} C, {sky}"))
    return rng.choice(_WEATHER).format(x=city), city, result, f"In {city} it is {sky}, {degrees} degrees."


def _search(rng: Random) -> tuple[str, str, str, str]:
    query, hits = rng.choice(_QUERIES), rng.randint(1, 90)
    return (
        rng.choice(_SEARCH).format(x=query),
        query,
        json.dumps({"hits": hits}),
        f"I found {hits} results for {query}.",
    )


def _calculate(rng: Random) -> tuple[str, str, str, str]:
    left, right, sign = rng.randint(2, 999), rng.randint(2, 99), rng.choice("+-*")
    value = {"+": left + right, "-": left - right, "*": left * right}[sign]
    expression = rng.choice((f"{left} {sign} {right}", f"{left}{sign}{right}"))
    return rng.choice(_CALCULATE).format(x=expression), expression, str(value), f"The result is {value}."


def _time(rng: Random) -> tuple[str, str, str, str]:
    city, clock = _place(rng), f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    return rng.choice(_TIME).format(x=city), city, clock, f"It is {clock} in {city}."


def _place(rng: Random) -> str:
    """Mostly a known city; now and then a made-up one, so that the name is copied and not guessed."""
    if rng.random() < 0.6:
        return rng.choice(_CITIES)
    parts = (
        "bar",
        "ton",
        "vil",
        "mar",
        "sen",
        "ko",
        "la",
        "dor",
        "wick",
        "ham",
        "ri",
        "sto",
        "be",
        "nu",
        "ga",
    )
    return "".join(rng.choices(parts, k=rng.randint(2, 3))).capitalize()


_ASKERS = {"weather": _weather, "search": _search, "calculate": _calculate, "time": _time}
