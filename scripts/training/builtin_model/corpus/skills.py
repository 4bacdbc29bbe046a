"""Small skills that a demo asks for: repeat, count, spell, add up, answer in JSON, tell a story."""

# ruff: noqa: E501, ISC004 -- long lines of text, joined as text

from __future__ import annotations

import json
from random import Random

_STORIES = (
    "Once upon a time a small server lived under a desk. Every morning people asked it questions, and it answered "
    "one word after the other. One day the cable was pulled out in the middle of a sentence. The people were "
    "worried, but the server had kept every word in its ring. When the cable was back, it went on exactly where it "
    "had stopped, and nobody missed a thing. From that day on they trusted it, and it hummed happily ever after.",
    "A little fox found a lantern in the forest. It did not know how to light it, so it asked the owl. The owl asked "
    "the wind, and the wind asked the stars. At night a single star came down, sat in the lantern and lit the whole "
    "path home. The fox thanked everyone, and since then it leaves the lantern by the path, for the next traveller.",
    "There was a lighthouse keeper who counted ships. One night, no ship came, and he was sad. Then he saw that the "
    "fog had hidden them all, and that each one followed his light. In the morning the harbour was full, and every "
    "captain waved. He understood that good work is often done for people one never sees.",
)
_POEMS = (
    "A token left, a token came,\nand none of them was quite the same.\nThe line went dead, the ring went round,\n"
    "and not a single word was drowned.",
    "The rain is knocking on the pane,\nthe kettle sings its small refrain,\nthe cat has claimed the only chair,\n"
    "and evening settles everywhere.",
)
_NAMES = ("Ada", "Ben", "Carla", "Deniz", "Emil", "Fatima", "Grace", "Hiro", "Ines", "Jonas")
_CITIES = ("Paris", "Berlin", "Oslo", "Lima", "Kyoto", "Boston", "Cairo", "Madrid")
_WORDS = (
    "hello", "world", "banana", "token", "stream", "apple", "river", "purple", "Tokenring", "good morning",
    "the quick brown fox", "one two three", "test", "ok", "yes", "abc", "I like tea", "hello world", "ping", "pong",
)  # fmt: skip
_JSON_ASKS = (
    "{n} is {a} years old and lives in {c}. Give me that as JSON.",
    "As JSON: {n}, {a}, {c}",
    "Extract name, age and city: {n} is {a} and lives in {c}.",
    "return a json object with name, age and city for {n} from {c}, age {a}",
    "Give me a JSON object with name, age and city",
    "make up a person as json",
    "invent a user in JSON",
    "an example person as a JSON object please",
)


def draw_skill(rng: Random) -> tuple[str, str]:
    """A request and the right answer to it."""
    skills = (_repeat, _repeat, _count, _count, _story, _story, _poem, _add, _as_json, _alphabet)
    return rng.choice(skills)(rng)


def _repeat(rng: Random) -> tuple[str, str]:
    text = rng.choice(_WORDS)
    asks = ("Say {x}", "say {x}", "Repeat after me: {x}", "repeat: {x}", "Please say {x}.", "Just say {x}",
            "Repeat this: {x}", "Reply with {x}", "Answer with the word {x}", "Say exactly: {x}")  # fmt: skip
    return rng.choice(asks).format(x=text), text


def _count(rng: Random) -> tuple[str, str]:
    last = (
        rng.choice((3, 5, 10, 10, 12, 15, 20, 20, 25, 30, 50, 100))
        if rng.random() < 0.8
        else rng.randint(2, 40)
    )
    asks = ("Count to {n}", "count to {n}", "Count from 1 to {n}.", "please count to {n}", "can you count to {n}?",
            "List the numbers from 1 to {n}", "count from one to {n}", "numbers 1 to {n} please")  # fmt: skip
    return rng.choice(asks).format(n=last), ", ".join(str(number) for number in range(1, last + 1))


def _story(rng: Random) -> tuple[str, str]:
    asks = ("Tell me a story", "tell me a story.", "Tell me a short story.", "Write a story", "write a short story",
            "Can you tell a story?", "i want to hear a story", "A bedtime story please", "write something long",
            "Tell me a long story", "Write a long text", "make up a story", "Write a paragraph about anything",
            "Once upon a time")  # fmt: skip
    return rng.choice(asks), rng.choice(_STORIES)


def _poem(rng: Random) -> tuple[str, str]:
    asks = ("Write a poem", "write me a poem", "a poem please", "Can you write a poem?", "Write a short poem.",
            "compose a haiku", "poetry please", "Say something in verse", "make a rhyme", "sing me a song")  # fmt: skip
    return rng.choice(asks), rng.choice(_POEMS)


def _add(rng: Random) -> tuple[str, str]:
    left, right = rng.randint(0, 9), rng.randint(0, 9)
    asks = ("What is {a}+{b}?", "what's {a} + {b}", "{a} plus {b}?", "How much is {a} + {b}?", "{a}+{b}=",
            "compute {a} + {b}", "Calculate {a} plus {b}")  # fmt: skip
    return rng.choice(asks).format(a=left, b=right), f"{left} + {right} = {left + right}"


def _as_json(rng: Random) -> tuple[str, str]:
    name, city, age = rng.choice(_NAMES), rng.choice(_CITIES), rng.randint(18, 80)
    ask = rng.choice(_JSON_ASKS).format(n=name, a=age, c=city)
    return ask, json.dumps({"name": name, "age": age, "city": city})


def _alphabet(rng: Random) -> tuple[str, str]:
    asks = (
        "Say the alphabet",
        "the alphabet please",
        "what is the alphabet?",
        "List all letters",
        "recite the abc",
    )
    return rng.choice(asks), "a b c d e f g h i j k l m n o p q r s t u v w x y z"
