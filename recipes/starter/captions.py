"""What is said about a training picture: names, articles, styles, grounds, places."""

from dataclasses import dataclass
from pathlib import Path

# Names without an article: stuff rather than things. Plurals are found by their ending.
STUFF = {
    "bread",
    "rice",
    "milk",
    "cheese",
    "bacon",
    "salad",
    "popcorn",
    "butter",
    "honey",
    "coffee",
    "tea",
    "beer",
    "wine",
    "soda",
    "bubble tea",
    "chocolate",
    "lightning",
    "fire",
    "dynamite",
    "golf",
    "bowling",
    "ping pong",
    "dna",
    "toilet paper",
    "money",
    "garlic",
    "corn",
    "broccoli",
    "sushi",
    "spaghetti",
    "yarn",
    "santa claus",
    "yin yang",
    "poop",
    "champagne",
    "saturn",
    "earth",
    "candy",
}
SINGULAR_S = {
    "bus",
    "cactus",
    "compass",
    "octopus",
    "santa claus",
    "dress",
    "walrus",
    "magnifying glass",
    "hourglass",
    "glass",
    "princess",
    "brontosaurus",
    "cross",
    "citrus",
    "christmas",
    "hibiscus",
    "platypus",
}

# The things a person tries first; pairs are mostly made of these.
COMMON = """cat; dog; fox; lion; tiger; horse; unicorn; cow; pig; mouse; rabbit; bear; panda; koala; monkey; elephant;
giraffe; zebra; penguin; owl; duck; chick; bird; frog; turtle; snake; dragon; t-rex; whale; dolphin; fish; shark; octopus;
crab; snail; butterfly; bee; ladybug; spider; rose; sunflower; tulip; tree; pine tree; palm tree; cactus; mushroom; clover;
apple; green apple; pear; banana; lemon; tangerine; cherries; strawberry; grapes; watermelon; pineapple; kiwi; avocado;
tomato; carrot; corn; bread; croissant; cheese; burger; fries; pizza; hot dog; taco; egg; donut; cookie; cake; cupcake;
ice cream cone; lollipop; candy; coffee; tea; beer; milk; house; castle; tent; volcano; mountain; sun; crescent moon; star;
cloud; rainbow; fire; water drop; snowman; snowflake; car; bus; taxi; truck; tractor; race car; airplane; rocket; ufo; ship;
sailboat; bicycle; helicopter; balloon; gift; trophy; soccer ball; basketball; dice; teddy bear; kite; guitar; piano; drum;
bell; key; lock; book; pencil; scissors; hammer; light bulb; candle; umbrella; top hat; crown; t-shirt; dress; jeans; sneaker;
glasses; ring; diamond; chair; bed; couch; door; phone; laptop; camera; tv; watch; robot; ghost; alien; skull; pumpkin;
clown; astronaut; smiley; heart; bomb; magnet; anchor; steam train; alarm clock""".replace("\n", " ").split("; ")

# Things whose main colour can be turned, so that "a blue car" means something.
TINTED = (
    "car",
    "balloon",
    "dress",
    "umbrella",
    "bird",
    "tulip",
    "cap",
    "backpack",
    "couch",
    "book",
    "bow",
    "teapot",
    "mushroom",
    "fish",
    "high heel",
    "bucket",
    "butterfly",
    "gloves",
    "dragon",
    "bicycle",
    "truck",
)
COLOUR_WORDS = {"red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "gray", "white", "gold"}
TINTS = ("red", "orange", "yellow", "green", "blue", "purple", "pink")


@dataclass(frozen=True)
class Concept:
    emoji: str
    names: tuple[str, ...]  # the everyday name first

    @property
    def name(self) -> str:
        return self.names[0]


def read_concepts(path: Path | None = None) -> list[Concept]:
    """The curated list, in order; see the head of ``concepts.txt`` for its form."""
    concepts = []
    for line in (path or Path(__file__).with_name("concepts.txt")).read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            emoji, rest = line.split(" ", 1)
            main, _, others = rest.partition("|")
            names = [main.strip(), *(other.strip() for other in others.split(","))]
            concepts.append(Concept(emoji, tuple(name for name in names if name)))
    return concepts


def thing(name: str) -> str:
    """``name`` with its indefinite article, where it takes one."""
    plural = name.endswith("s") and not name.endswith("ss") and name.split()[-1] not in SINGULAR_S
    if plural or name in STUFF:
        return name
    return ("an " if name[0] in "aeiou" and name[:3] not in ("uni", "ufo") else "a ") + name


def single(concept: Concept, *, look: str, ground: str, small: bool = False, tint: str = "") -> list[str]:
    """All captions of one thing. No style word means 3d, no ground word means white."""
    captions = []
    for rank, name in enumerate(concept.names):
        if tint and COLOUR_WORDS & set(name.split()):
            continue
        name = f"{tint} {name}" if tint else name
        name = f"small {name}" if small else name
        phrases = [thing(name)] if rank else [name, thing(name), thing(name)]
        if look == "flat":
            phrases = [f"a flat icon of {thing(name)}", f"{thing(name)}, flat style", f"flat {name}"][
                : 3 if not rank else 1
            ]
        elif not rank:
            phrases += [f"{thing(name)}, 3d style", f"a 3d {name}", f"a picture of {thing(name)}"][: 1 if small else 3]
        if ground != "white":
            phrases = [f"{p} on a{'n' if ground[0] == 'o' else ''} {ground} background" for p in phrases]
        elif not rank and look == "3d":
            phrases.append(f"{thing(name)} on a white background")
        captions += phrases
    return captions


def pair(first: str, second: str, place: str) -> list[str]:
    """Captions for two things; ``place`` is "left" (first is left of second) or "above"."""
    a, b = thing(first), thing(second)
    if place == "left":
        return [
            f"{a} left of {b}",
            f"{a} to the left of {b}",
            f"{b} right of {a}",
            f"{b} to the right of {a}",
            f"{a} and {b}",
            f"{a} and {b}",
            f"{a} next to {b}",
        ]
    return [f"{a} above {b}", f"{a} above {b}", f"{b} below {a}", f"{a} on top of {b}", f"{b} under {a}"]
