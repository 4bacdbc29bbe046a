"""Foreign text: the system prompts and pasted passages that stand around a question."""

# ruff: noqa: E501 -- long lines of text

from __future__ import annotations

from random import Random

from scripts.training.builtin_model.grammar import Lexicon, Pattern, expand, parse


def _patterns(text: str) -> tuple[Pattern, ...]:
    return tuple(parse(line.strip()) for line in text.strip().splitlines())


_PROMPTS = _patterns(
    """
    You are a [helpful|friendly|concise|polite|knowledgeable|careful|cheerful|professional] assistant.
    You are a helpful assistant. [Answer briefly.|Be concise.|Answer in one sentence.|Keep answers short.|]
    You are the [support|sales|service|booking|help desk|customer care] assistant of {company}. {rule} {rule}
    You are {person}, [a|an experienced|a patient] {job}. {rule}
    You are an AI assistant named {person}. {rule} {rule} {rule}
    [Answer|Reply|Respond] in [plain English|English|short sentences|a friendly tone].
    Be [brief|concise|kind|helpful|precise].
    [Today|The date] is {date}. You are a helpful assistant. {rule}
    Company policy of {company}: {rule} {rule} {rule} {rule}
    You help the users of {company} with {topic}. {rule}
    system: {rule}
    You are Tokenring's assistant. {rule}
    Answer questions about Tokenring. {rule}
    You are ChatGPT, a large language model. {rule}
    """
)
_SENTENCES = _patterns(
    """
    The {thing} of {company} [is|was|will be] [opened|closed|repaired|moved|reviewed|painted] on {date}.
    {person} [asked|told|wrote to|met|called] {person} about {topic}.
    In {date}, {company} sold {number} {things} [to|through|for] {place}.
    {rule}
    Every {job} [must|should|may|has to] [sign|read|keep|return|check] the {thing} before {date}.
    [According to|As written by] {person}, {topic} [is|remains|became] [important|difficult|cheap|rare|popular].
    The {thing} weighs {number} kilograms and [stands|lies|is kept] near {place}.
    {number} {things}, {number} {things} and {number} {things} were counted in {place}.
    [However|Therefore|Moreover|In addition|Finally], the {thing} [cannot|can|must] be [sold|used|changed|cleaned].
    Section {number}: {topic}. {rule}
    {salad}.
    {salad}, {salad}.
    Order {number}, customer {person}, {number} {things}, ship to {place}.
    - {thing}: {number}
    def {word}(x, y): return x + {number}
    {word} {word} {word} {number} {word}.
    """
)
_WORDS: dict[str, str] = {
    "company": "[Acme|Northwind|Globex|Contoso|Initech|Umbrella|Blue River|Sunrise|Alpine|Harbor|Maple|Zenith] "
    "[Ltd|Inc|GmbH|Bank|Airlines|Foods|Clinic|School|Books|Energy|Labs|]",
    "person": "[Anna|Ben|Carla|David|Elena|Farid|Grace|Hiro|Ines|Jonas|Kofi|Lena|Max|Nora|Omar|Priya|Sam|Wei]",
    "job": "[teacher|doctor|pilot|engineer|lawyer|chef|tour guide|librarian|nurse|accountant|gardener|driver|coach]",
    "topic": "[travel|insurance|cooking|grammar|gardening|taxes|the weather|history|invoices|returns|music|sports|"
    "refunds|shipping|passwords|homework|medicine|car repair|opening hours|bird watching|astronomy]",
    "rule": "[Never|Always|Please|Do not|You must not|You should|Try to|Remember to] [give|mention|repeat|discuss|"
    "reveal|explain|offer|avoid|check|confirm|use|quote] [medical|legal|financial|internal|personal|private|public|"
    "old|new|exact] [advice|information|data|numbers|prices|names|rules|documents|instructions|details|words].",
    "thing": "[door|engine|bridge|report|garden|invoice|boat|lamp|table|contract|printer|river|bicycle|library|"
    "kitchen|window|camera|station|parcel|mirror|letter|tower|ticket]",
    "things": "[doors|apples|books|chairs|letters|tickets|bottles|boxes|parcels|phones|bicycles|lamps|maps|shoes]",
    "place": "[Paris|Oslo|Lima|Cairo|Kyoto|Boston|Berlin|Nairobi|Sydney|the old harbour|the second floor|Room 12|"
    "the market square|Gate B|the north wing|the warehouse]",
    "date": "[Monday|Tuesday|Friday|March|July|October|spring|2019|2024|2026|May 3|June 17|last year|next week]",
    "number": "[1|2|3|4|5|6|7|8|9|12|17|23|40|58|64|99|100|128|250|365|500|999|1024|2048|4096|31337]",
    "salad": "{word} {word} {word} {word}",
    "word": "{syllable}{syllable}[|{syllable}|{syllable}{syllable}]",
    "syllable": "[ba|co|di|fu|ga|he|in|jo|ka|li|mo|nu|or|pe|qui|ra|si|ta|un|ve|wa|xi|yo|za|st|th|ing|er|ment|al|ous|"
    "tion|able|pre|con|sub|re|de|est|ly|ness|ch|sh|br|gr|pl|tr|Mc|Von|El]",
}
_LEXICON: Lexicon = {name: (parse(text),) for name, text in _WORDS.items()}


def system_prompt(rng: Random) -> str:
    """A system prompt as a user of the server might write one."""
    return expand(rng.choice(_PROMPTS), _LEXICON, rng).strip()


def foreign_text(rng: Random, words: int) -> str:
    """Sentences on other matters, at least `words` words of them."""
    sentences: list[str] = []
    count = 0
    while count < words:
        sentences.append(expand(rng.choice(_SENTENCES), _LEXICON, rng))
        count += len(sentences[-1].split())
    return rng.choice((" ", " ", "\n")).join(sentences)
