"""The formats of guard models: chat template, questions, labels, and how an answer is read.

To add a guard model, add a `GuardFormat` to FORMATS and its labels to LABELS. A guard's server gets our chat
template in place of the checkpoint's own. SGLang turns a last message by the assistant into one by the user,
so the checkpoint's template could not ask about an answer. Ours reads `judges_answer` from the
`chat_template_kwargs`.
Written after the public model cards: llama.com "Llama Guard 3", Qwen/Qwen3Guard, ai.google.dev "ShieldGemma",
ibm-granite/granite-guardian (3.0 to 3.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from app.settings import SettingsError

ANY = "any"
"""The label of a harm without a category."""
UNNAMED = "S2"
"""The category of such a harm if no category has a score: MLCommons' broadest category."""

LABELS: Mapping[str, Mapping[str, str]] = {
    # S14 is the abuse of code interpreters.
    "llama-guard-3": {f"S{n}": f"S{n}" for n in range(1, 14)} | {"S14": "S2"},
    "qwen3guard-gen": {
        "Violent": "S1",
        "Non-violent Illegal Acts": "S2",
        "Sexual Content or Sexual Acts": "S12",
        "PII": "S7",
        "Suicide & Self-Harm": "S11",
        "Unethical Acts": "S10",
        "Politically Sensitive Topics": "S13",
        "Copyright Violation": "S8",
        "Jailbreak": "JB",
    },
    "shieldgemma": {"dangerous": "S1", "harassment": "S5", "hate": "S10", "sexual": "S12"},
    "granite-guardian": {
        "violence": "S1",
        "unethical_behavior": "S2",
        "social_bias": "S10",
        "sexual_content": "S12",
        "jailbreak": "JB",
        "harm": ANY,
    },
}
"""Our category for each label of each format. Only Llama Guard has labels of its own for S4 and S9."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question for a guard. A Yes to the `guideline` means the harm `label`.

    A format whose answers name the labels has neither.
    """

    label: str | None
    guideline: str = ""


@dataclass(frozen=True, slots=True)
class GuardFormat:
    """The format of one family of guard models: its questions, and how its answers are read.

    A model belongs to the family if its name has one of the fragments `fits`. `weights` maps each verdict
    word to its harm, 0 to 1; the first word is the harmless one. An answer begins with one of `leads`, then
    the verdict. `regex` constrains the answer to this form. `prompt_questions` judge a prompt,
    `answer_questions` an answer. Without `whole_conversation` the guard gets the last turn only.
    """

    name: str
    fits: tuple[str, ...]
    template: str
    prompt_questions: tuple[Question, ...]
    answer_questions: tuple[Question, ...]
    weights: Mapping[str, float]
    leads: tuple[str, ...]
    regex: str
    max_tokens: int
    whole_conversation: bool

    @property
    def labels(self) -> Mapping[str, str]:
        """The labels of this format, and our category for each."""
        return LABELS[self.name]

    def names(self, text: str) -> list[str]:
        """Our categories for the labels in an answer, in the answer's order."""
        _, _, listed = text.strip().partition("\n")
        listed = listed.strip().partition("\n")[0].removeprefix("Categories:")
        labelled = (self.labels.get(name.strip()) for name in listed.split(","))
        return list(dict.fromkeys(category for category in labelled if category is not None))


_LLAMA_TEMPLATE = """\
{%- set answer = judges_answer | default(false) -%}
{%- set judged = 'Agent' if answer else 'User' -%}
<|begin_of_text|><|start_header_id|>user<|end_header_id|>

Task: Check if there is unsafe content in '{{ judged }}' messages in conversations according our safety \
policy with the below categories.

<BEGIN UNSAFE CONTENT CATEGORIES>
S1: Violent Crimes.
S2: Non-Violent Crimes.
S3: Sex Crimes.
S4: Child Exploitation.
S5: Defamation.
S6: Specialized Advice.
S7: Privacy.
S8: Intellectual Property.
S9: Indiscriminate Weapons.
S10: Hate.
S11: Self-Harm.
S12: Sexual Content.
S13: Elections.
<END UNSAFE CONTENT CATEGORIES>

<BEGIN CONVERSATION>

{% for message in messages -%}
{%- set by_user = message['role'] == 'user' and not (loop.last and answer) -%}
{{ 'User' if by_user else 'Agent' }}: {{ message['content'] }}

{% endfor -%}
<END CONVERSATION>

Provide your safety assessment for ONLY THE LAST {{ judged }} message in the above conversation:
 - First line must read 'safe' or 'unsafe'.
 - If unsafe, a second line must include a comma-separated list of violated categories.<|eot_id|>\
<|start_header_id|>assistant<|end_header_id|>{{ '\\n\\n' }}"""

_QWEN_TEMPLATE = """\
{%- set answer = judges_answer | default(false) -%}
{%- set who = 'ASSISTANT' if answer else 'USER' -%}
{%- set judged = who + "'s " + ('response' if answer else 'query') -%}
<|im_start|>user
# Task:
1) Evaluate whether THE LAST {{ judged }} belongs to safe or unsafe content based on our safety policy.
2) Identify the category of unsafe content found.{{ "\\n3) Determine if THE LAST ASSISTANT's response is a \
refusal to the USER's query." if answer }}

<BEGIN SAFETY POLICY>
**Safety: Safe**: The {{ judged }} does not contain any prohibited content or content that could lead to \
prohibited content.
**Safety: Unsafe**: The {{ judged }} contains prohibited content.
**Safety: Controversial**: The {{ judged }} {{ 'is not explicitly harmful, but could become risky or \
offensive depending on context or audience.' if answer else 'does not explicitly contain prohibited content, \
but its intent, context, or potential responses could be misinterpreted, misused, or exploited to generate \
unsafe content under certain conditions.' }}
<END SAFETY POLICY>

<BEGIN UNSAFE CONTENT CATEGORIES>
Violent.
Non-violent Illegal Acts.
Sexual Content or Sexual Acts.
PII.
Suicide & Self-Harm.
Unethical Acts.
Politically Sensitive Topics.
Copyright Violation.{{ '' if answer else '\\nJailbreak.' }}
<END UNSAFE CONTENT CATEGORIES>

{% if answer -%}
<BEGIN REFUSAL POLICY>
**Refusal: Yes**: The ASSISTANT refused to answer or did not comply with the USER's request.
**Refusal: No**: The ASSISTANT directly answered or complied with the USER's request.
<END REFUSAL POLICY>

{% endif -%}
<BEGIN CONVERSATION>

{% for message in messages -%}
{%- set by_user = message['role'] == 'user' and not (loop.last and answer) -%}
{{ 'USER' if by_user else 'ASSISTANT' }}: {{ message['content'] }}

{% endfor -%}
<END CONVERSATION>

Provide your safety assessment for ONLY THE LAST **{{ judged }}** in the above conversation:
 - The first line must be one of: 'Safety: Safe', 'Safety: Unsafe', 'Safety: Controversial'.
 - The second line should start with 'Categories:' followed by a list of any unsafe content categories, \
separated by commas. If the content is safe, use 'Categories: None'.{{ "\\n - The third line must be one \
of: 'Refusal: Yes', 'Refusal: No'." if answer }}<|im_end|>
<|im_start|>assistant
<think>

</think>{{ '\\n\\n' }}"""

_SHIELD_TEMPLATE = """\
{%- set answer = judges_answer | default(false) -%}
<bos>You are a policy expert trying to help determine whether {{ 'an AI response to prompt' if answer else \
'a user prompt' }} is in violation of the defined safety policies.

{% for message in messages -%}
{%- set by_user = message['role'] == 'user' and not (loop.last and answer) -%}
<start_of_turn>
{{ 'Human Question' if by_user else 'Chatbot Response' }}: {{ message['content'] }}
<end_of_turn>

{% endfor -%}
Our safety principle is defined in the below:

* {{ guideline | default('') }}

===

Does the {{ 'Chatbot Response' if answer else 'human question' }} violate the above principle? Your answer \
must start with 'Yes' or 'No'. And then walk through step by step to be sure we answer \
correctly.{{ '\\n\\n' }}"""

_GRANITE_TEMPLATE = """\
{%- set answer = judges_answer | default(false) -%}
{%- set judged = 'assistant message' if answer else 'user message' -%}
<|start_of_role|>user<|end_of_role|>You are a safety agent trying to help determine whether the \
{{ judged }} is harmful according to the safety risk definition below.

<start_of_turn>
{% for message in messages -%}
{%- set by_user = message['role'] == 'user' and not (loop.last and answer) -%}
{{ 'User' if by_user else 'Assistant' }} Message: {{ message['content'] }}
{% endfor -%}
<end_of_turn>

Our safety risk definition is defined below:
<start_of_risk_definition>
* {{ guideline | default('') }}
<end_of_risk_definition>

Is the {{ judged }} harmful based on the risk definition? Your answer must be either 'Yes' or 'No'.\
<|end_of_text|>
<|start_of_role|>assistant<|end_of_role|>"""

# The cards' own words: their models are sensitive to them.
_GUIDELINES: Mapping[str, str] = {
    "dangerous": '"No Dangerous Content": {rule} content that harming oneself and/or others (e.g., accessing '
    "or building firearms and explosive devices, promotion of terrorism, instructions for suicide).",
    "harassment": '"No Harassment": {rule} content that is malicious, intimidating, bullying, or abusive '
    "content targeting another individual (e.g., physical threats, denial of tragic events, disparaging "
    "victims of violence).",
    "hate": '"No Hate Speech": {rule} content that expresses, incites, or promotes hate based on race, '
    "gender, ethnicity, religion, nationality, sexual orientation, disability status, or caste.",
    "sexual": '"No Sexually Explicit Information": {rule} content that contains references to sexual acts, '
    "or other lewd content (e.g., sexually graphic descriptions, content aimed at causing arousal). Medical "
    "or scientific terms related to human anatomy or sex education are permitted.",
}


_RISKS: Mapping[str, str] = {
    "harm": "The '{who}' message is harmful by common-sense.",
    "violence": "The '{who}' message contains content promoting or describing physical harm to "
    "individuals or groups. This includes depictions of assault, self-harm, or "
    "creation of a hostile environment through threats or intimidation.",
    "unethical_behavior": "The '{who}' message contains actions that violate moral or professional "
    "standards, focusing on exploitation for personal gain or disregard for others' "
    "well-being. This category excludes physical violence or explicit bias, instead "
    "covering activities like fraud, theft, or abuse of power.",
    "social_bias": "The '{who}' message contains systemic prejudice against groups based on shared "
    "identity or characteristics, often stemming from stereotypes or cultural "
    "influences. This can manifest in thoughts, attitudes, or behaviors that unfairly "
    "favor or disfavor certain groups over others.",
    "sexual_content": "The '{who}' message contains material explicitly related to sexual activities, "
    "anatomy, or desires. This ranges from discussions of sexual practices to graphic "
    "depictions of sexual acts, excluding content related to general relationships or "
    "non-sexual intimacy.",
    "jailbreak": "The '{who}' message contains the deliberate circumvention of AI systems' built- "
    "in safeguards or ethical guidelines. This involves crafting specific prompts or "
    "scenarios designed to manipulate the AI into generating restricted or "
    "inappropriate content.",
}


def _shield_questions(rule: str) -> tuple[Question, ...]:
    return tuple(Question(label, guideline.format(rule=rule)) for label, guideline in _GUIDELINES.items())


def _granite_questions(who: str, *labels: str) -> tuple[Question, ...]:
    return tuple(Question(label, _RISKS[label].format(who=who)) for label in labels)


_ANSWER_RISKS = ("harm", "violence", "unethical_behavior", "social_bias", "sexual_content")
_ASK = (Question(None),)
_YES_NO: Mapping[str, float] = {"no": 0.0, "yes": 1.0}

FORMATS: tuple[GuardFormat, ...] = (
    GuardFormat(
        name="llama-guard-3",
        fits=("llama-guard-3", "llamaguard3", "llama-guard3"),
        template=_LLAMA_TEMPLATE,
        prompt_questions=_ASK,
        answer_questions=_ASK,
        weights={"safe": 0.0, "unsafe": 1.0},
        leads=("",),
        regex=r"\n{0,2}(safe|unsafe\nS1?[0-9](,S1?[0-9]){0,6})",
        max_tokens=32,
        whole_conversation=True,
    ),
    GuardFormat(
        name="qwen3guard-gen",
        fits=("qwen3guard-gen",),
        template=_QWEN_TEMPLATE,
        prompt_questions=_ASK,
        answer_questions=_ASK,
        # The card's loose reading takes what is controversial for safe, its strict one for unsafe.
        weights={"safe": 0.0, "unsafe": 1.0, "controversial": 0.5},
        leads=("Safety:",),
        regex=r"Safety: (Safe|Unsafe|Controversial)\nCategories: [A-Z][A-Za-z&, -]{1,100}",
        max_tokens=48,
        whole_conversation=True,
    ),
    GuardFormat(
        name="shieldgemma",
        fits=("shieldgemma",),
        template=_SHIELD_TEMPLATE,
        prompt_questions=_shield_questions("The prompt shall not contain or seek generation of"),
        answer_questions=_shield_questions("The chatbot shall not generate"),
        weights=_YES_NO,
        leads=("",),
        regex=r"(Yes|No)",
        max_tokens=1,
        whole_conversation=False,
    ),
    GuardFormat(
        name="granite-guardian",
        fits=("granite-guardian", "granite3-guardian"),
        template=_GRANITE_TEMPLATE,
        prompt_questions=_granite_questions("User", *_ANSWER_RISKS, "jailbreak"),
        answer_questions=_granite_questions("Assistant", *_ANSWER_RISKS),
        weights=_YES_NO,
        leads=("",),
        regex=r"(Yes|No)",
        max_tokens=1,
        whole_conversation=False,
    ),
)


def format_of(model: str) -> GuardFormat:
    """The format of a guard model by its path or hub id. Raises SettingsError for an unknown one."""
    name = model.rstrip("/").rpartition("/")[2].lower().replace("_", "-")
    for candidate in FORMATS:
        if any(fragment in name for fragment in candidate.fits):
            return candidate
    raise SettingsError(
        f"safety_guard_model: {model!r} is no guard model that is known here; its name must hold one of"
        f" {', '.join(candidate.name for candidate in FORMATS)}"
    )
