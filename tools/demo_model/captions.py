"""English captions: articles, plurals and several ways to describe a scene."""

from __future__ import annotations

from random import Random

from tools.demo_model.backgrounds import COLORS

NO_ARTICLE = {
    *("grapes", "cherries", "pancakes", "fries", "french fries", "glasses", "scissors", "socks"),
    *("gloves", "bread", "broccoli", "sushi", "popcorn", "beer", "wine", "honey", "fire"),
    *("lightning", "corn", "dice", "coffee", "saturn"),
}
"""Names that stand alone: plurals and things that are not counted."""

UNIQUE = {"sun", "moon", "earth"}
"""Names that take "the": there is one of them."""

PLURALS = {
    **{"mouse": "mice", "wolf": "wolves", "sheep": "sheep", "fish": "fish", "deer": "deer"},
    **{"tropical fish": "tropical fish", "maple leaf": "maple leaves", "cactus": "cacti"},
    **{"four leaf clover": "four leaf clovers", "slice of pizza": "slices of pizza"},
    **{"cup of coffee": "cups of coffee", "mug of beer": "mugs of beer"},
    **{"glass of wine": "glasses of wine", "face with heart eyes": "faces with heart eyes"},
    **{"face with sunglasses": "faces with sunglasses", "compass": "compasses"},
}


def with_article(name: str) -> str:
    """ "an apple", "a dog", "grapes"."""
    if name in NO_ARTICLE:
        return name
    if name in UNIQUE:
        return f"the {name}"
    vowel = name[0] in "aeiou" and not name.startswith(("unicorn", "ufo"))
    return f"{'an' if vowel else 'a'} {name}"


def plural(name: str) -> str | None:
    """ "dogs" for "dog"; None for a name that is not counted."""
    if name in NO_ARTICLE or name in UNIQUE:
        return None
    if name in PLURALS:
        return PLURALS[name]
    if name.endswith("y") and name[-2] not in "aeiou":
        return f"{name[:-1]}ies"
    return f"{name}es" if name.endswith(("s", "x", "ch", "sh")) else f"{name}s"


def say_objects(names: list[str], choice: Random) -> str:
    """Name several different objects from left to right, or from top to bottom."""
    bare = choice.random() < 0.1
    said = [name if bare else with_article(name) for name in names]
    if len(said) == 1:
        return said[0]
    if len(said) == 2 and choice.random() < 0.25:
        return f"{said[0]} next to {said[1]}"
    return f"{', '.join(said[:-1])} and {said[-1]}"


def say_scene(objects: str, background: str, choice: Random) -> str:
    """Say objects and background in one of several ways; white may go unsaid."""
    opening = choice.choices(("", "a picture of ", "an emoji of "), weights=(8, 1, 1))[0]
    if background == "white" and choice.random() < 0.6:
        return f"{opening}{objects}"
    if background not in COLORS:
        return f"{opening}{objects} {background}"
    article = "an" if background[0] in "aeiou" else "a"
    ways = (
        f"{objects} on {article} {background} background",
        f"{objects}, {background} background",
    )
    return opening + choice.choices(ways, weights=(3, 1))[0]
