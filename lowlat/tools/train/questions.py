"""Questions for a chat target to answer, made from a text: what a draft model for that target is trained on.

    python -m lowlat.tools.train.questions --text FILE --out FILE.json [--count 40000] [--exclude FILE.json]

Words, places, functions, titles and passages found in the training documents are put into hand-written forms. The
questions need not be good ones: the draft model learns the target's own answers, whatever they are.
"""

import argparse
import json
import random
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from lowlat.tools.train.corpus import domain_of, read_documents, read_prompts, split

__all__ = ["make_questions"]

_WORD = re.compile(r"^([a-z][a-z' -]{2,28})(?:, [^(]*)? \((noun|verb|adjective|adverb)[^)]*\): ([^;\n]+)", re.MULTILINE)
_COUNTRY = re.compile(r"^Country name: conventional short form: ([A-Z][A-Za-z' -]+)$", re.MULTILINE)
_FUNCTION = re.compile(r"^def ([a-z][a-z0-9_]{3,40})\(([^)\n]*)\)", re.MULTILINE)
_SHORT_CODE = re.compile(
    r"^(def [a-z][a-z0-9_]{3,40}\([^)\n]*\)[^\n]*:\n(?:    [^\n]*\n){2,10})(?=\n|\S)", re.MULTILINE
)

_FORMS: dict[str, tuple[str, ...]] = {
    "noun": (
        "What is {article}?",
        "Tell me about {plain}.",
        "Explain {plain} to a child.",
        'Use the word "{plain}" in a sentence.',
        "Write a short story about {article}.",
        "Write a poem about {plain}.",
        "What is the history of {plain}?",
        "Give me five facts about {plain}.",
        "What are the main kinds of {plain}?",
        "How is {plain} used?",
        "Why does {plain} matter?",
        "What is the difference between {plain} and {other}?",
        "Compare {plain} with {other}.",
        "List three advantages and three disadvantages of {plain}.",
        "How does {plain} work?",
        "Write an essay about {plain}.",
        "I want to learn about {plain}. Where do I start?",
        "Can you describe {article} in detail?",
        "Write a dialogue between two people about {plain}.",
        "What would happen without {plain}?",
        "Give me a list of ideas that involve {plain} and {other}.",
        "Write an email to a friend about {plain}.",
        "Is {plain} dangerous?",
        "What should I know before I buy {article}?",
        "Write a product description for {article}.",
    ),
    "verb": (
        "What does it mean to {plain}?",
        "How do I {plain}?",
        'Write a sentence with the verb "{plain}".',
        "When should one {plain}?",
        'Give me synonyms of "{plain}".',
        'What is the past tense of "{plain}"?',
        "Give me some tips on how to {plain} better.",
        "Write a short story in which people {plain}.",
    ),
    "adjective": (
        'What does "{plain}" mean?',
        "Name some things that are {plain}.",
        'What is the opposite of "{plain}"?',
        'Write three sentences with the word "{plain}".',
        "Describe a {plain} person.",
        "Write a story about a {plain} day.",
    ),
    "adverb": ('What does "{plain}" mean?', 'Use "{plain}" in three sentences.'),
    "gloss": (
        "Which word means: {text}?",
        "Say this in other words: {text}.",
        "Translate into simple English: {text}.",
        "Make a full sentence of this: {text}.",
    ),
    "country": (
        "What is the capital of {plain}?",
        "Tell me about the history of {plain}.",
        "What languages are spoken in {plain}?",
        "Describe the economy of {plain}.",
        "Plan a week in {plain}.",
        "What is the climate of {plain}?",
        "Which countries border {plain}?",
        "What food is typical of {plain}?",
        "Describe the geography of {plain}.",
        "What is {plain} known for?",
        "Write a short guide to {plain}.",
        "How many people live in {plain}?",
    ),
    "function": (
        "Write a Python function called {plain}.",
        "Write a Python function {plain}({arguments}).",
        "What might a Python function called {plain} do?",
        "Write a test for a Python function called {plain}.",
        "Write a docstring for the Python function {plain}({arguments}).",
    ),
    "code": (
        "Explain what this code does:\n\n{text}",
        "Find the mistakes in this code:\n\n{text}",
        "Add comments to this code:\n\n{text}",
    ),
    "title": (
        "What is {plain}?",
        "Explain {plain} in simple terms.",
        "Give me an example of {plain}.",
        "What is {plain} used for?",
    ),
    "passage": (
        "Summarise this:\n\n{text}",
        "Summarize the following text in one sentence: {text}",
        "Continue this text: {text}",
        "What is this about?\n\n{text}",
        "Rewrite this in simpler words:\n\n{text}",
        "List the key points of this:\n\n{text}",
        "Give this text a title:\n\n{text}",
    ),
    "sum": (
        "What is {a} plus {b}?",
        "What is {a} times {b}?",
        "I have {a} apples and give away {b}. How many are left?",
        "A train goes {a} km in {b} hours. How fast is it?",
        "Is {a} larger than {b}?",
        "Count from {b} to {a}.",
        "If a book costs {a} dollars and I buy {b} of them, how much do I pay?",
    ),
}


def _materials(documents: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
    """Collect (name, rest) pairs by kind of form."""
    found: dict[str, list[tuple[str, str]]] = {kind: [] for kind in _FORMS}
    for document in documents:
        domain = domain_of(document)
        if domain == "definitions":
            for word, part, gloss in _WORD.findall(document):
                found[part].append((word, gloss))
                found["gloss"].append((word, gloss))
        elif domain == "facts":
            found["country"] += [(country, "") for country in _COUNTRY.findall(document)]
        elif domain == "code":
            found["function"] += [(name, arguments[:60]) for name, arguments in _FUNCTION.findall(document)[:3]]
            found["code"] += [("", code[:400]) for code in _SHORT_CODE.findall(document)[:2]]
        else:
            first = document.lstrip().split("\n", 1)[0].strip(" .#=")
            if domain == "documentation" and 4 < len(first) < 50 and first[0].isalpha() and "More" not in first:
                found["title"].append((first, ""))
            stripped = (paragraph.strip() for paragraph in document.split("\n\n"))
            paragraphs = [text for text in stripped if 150 < len(text) < 420 and text[-1] in ".!?”"]
            found["passage"] += [("", paragraph.replace("\n", " ")) for paragraph in paragraphs[:3]]
    return found


def make_questions(documents: Sequence[str], count: int, *, seed: int = 0) -> list[str]:
    """Return at most `count` different questions in random order; common kinds weigh more."""
    rng = random.Random(seed)
    found = _materials(documents)
    found["sum"] = [("", "")]
    weights = {
        "noun": 9,
        "verb": 3,
        "adjective": 2,
        "adverb": 0.5,
        "gloss": 1,
        "country": 2,
        "function": 3,
        "code": 1.5,
    }
    weights |= {"title": 1.5, "passage": 3, "sum": 1}
    kinds = [kind for kind in _FORMS if found[kind]]
    nouns = found["noun"] or [("water", "")]
    questions: dict[str, None] = {}
    for kind in rng.choices(kinds, [weights[kind] for kind in kinds], k=2 * count):
        name, rest = rng.choice(found[kind])
        article = f"{'an' if name[:1] in 'aeiou' else 'a'} {name}"
        a, b = rng.randint(3, 999), rng.randint(2, 60)
        form = rng.choice(_FORMS[kind])
        filled = form.format(
            plain=name, article=article, other=rng.choice(nouns)[0], text=rest, arguments=rest, a=a, b=b
        )
        questions[filled] = None
        if len(questions) >= count:
            break
    return list(questions)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make questions for a chat target from a text.")
    parser.add_argument("--text", required=True, help="documents separated by <|endoftext|> lines; .xz is read too")
    parser.add_argument("--out", required=True, help="JSON list to write")
    parser.add_argument("--count", type=int, default=40_000)
    parser.add_argument("--exclude", help="JSON of held-out questions that must not be among them")
    arguments = parser.parse_args()
    training, _ = split(read_documents(arguments.text))
    excluded = set(chain.from_iterable(read_prompts(arguments.exclude).values())) if arguments.exclude else set()
    questions = [q for q in make_questions(training, arguments.count) if q not in excluded]
    Path(arguments.out).write_text(json.dumps(questions, ensure_ascii=False, indent=0), encoding="utf-8")
    print(f"{len(questions)} questions")


if __name__ == "__main__":
    main()
