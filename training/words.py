"""The vocabulary of the synthetic dialogues, and small pieces of text made of it."""

from __future__ import annotations

from random import Random


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words(
    """
    Anna Ben Carla David Emma Felix Greta Hugo Ida Jonas Karin Leo Maria Nils Olga Paul Rosa Sam Tina Uma Victor
    Wendy Yusuf Zoe Alice Bob Chen Dina Erik Fatima George Hana Ivan Julia Kofi Lena Marco Nora Omar Priya Ravi Sara
    Tom Aisha Bruno Clara Dmitri Elena Frank Grace Henry Ingrid Jack Kate Liam Mina Noah Oscar Petra Quinn Ruth
    Simon Theo
    """
)

CITIES = _words(
    """
    Paris London Berlin Madrid Rome Vienna Prague Oslo Lisbon Dublin Athens Warsaw Zurich Geneva Munich Hamburg
    Tokyo Osaka Seoul Beijing Delhi Mumbai Cairo Lagos Nairobi Boston Chicago Denver Austin Seattle Toronto Lima
    Quito Havana Sydney Perth Dallas Miami Kyoto Bergen Porto Turin Lyon Nice Ghent Basel Graz Split Riga Bonn
    """
)

COLORS = _words("red blue green yellow black white brown grey purple orange pink silver golden violet")

ANIMALS = _words(
    """
    cat dog horse cow sheep goat lion tiger bear wolf fox rabbit mouse snake eagle owl duck goose frog whale shark
    camel zebra monkey elephant parrot turtle spider bee ant
    """
)

THINGS = _words(
    """
    apple book car house tree chair table lamp phone bottle cup plate knife fork spoon box bag key door window pen
    pencil letter coin ring watch clock shoe hat coat shirt boat train bus bike ball kite drum piano guitar violin
    stone leaf flower garden river bridge tower wall roof carpet mirror pillow blanket basket bucket ladder hammer
    rope candle ticket stamp map flag cake bread cheese egg orange lemon melon cherry carrot onion potato tomato
    """
)

COUNTED = _words(
    """
    apples books cars coins pens stamps eggs cards marbles tickets stones shells cookies balloons pencils stickers
    cups plates boxes keys flowers trees bottles oranges lemons photos letters chairs bricks candles
    """
)

ADJECTIVES = _words(
    """
    big small old new good bad hot cold long short fast slow hard soft light dark high low open closed full empty
    clean dirty dry wet loud quiet rich poor strong weak early late young happy sad calm brave clever kind simple
    common rare ready free busy safe deep wide narrow thick thin sharp flat round heavy sweet sour fresh cheap plain
    warm cool modern local public private main final global recent stable exact valid random daily
    """
)

VERBS = _words(
    """
    get find make take give show read write send open close start stop run move copy add remove delete update create
    list search check test build load save print count sort filter merge split join parse format convert compute
    measure compare select choose set reset fetch store query call ask tell explain describe translate summarize
    review plan book buy sell order pay cancel confirm schedule remind notify share upload download install deploy
    restart monitor inspect scan track log lock unlock enable disable assign rename archive restore validate export
    import play pause record draw paint cook clean repair watch walk drive fly swim climb visit meet help learn
    teach
    """
)

NOUNS = _words(
    """
    time year day week month hour minute person man woman child friend team group company office school teacher
    student doctor nurse driver farmer writer player worker user customer member city town village country street
    road park market shop station airport hotel kitchen room floor hall place point side end part line list page
    word sentence text name title number value result answer question problem reason idea plan step task job work
    project issue ticket bug feature test case file folder path image photo video sound song music movie game story
    news report summary note message email letter call meeting event calendar date weather rain snow wind sun water
    fire earth air food meal lunch dinner recipe price cost money bank account invoice payment order product item
    stock store package delivery address contact phone profile account password token key code program function
    class method module library server client database table row column index record query request response session
    log error warning status version release branch commit change review comment document draft template form field
    label tag type size color shape weight length width height speed distance temperature pressure level limit range
    rate score rank total sum average count amount share budget tax salary hour shift schedule route trip flight
    train ticket seat map region area zone language translation dictionary letter symbol sign light sensor device
    camera screen button keyboard printer network signal channel topic group role permission policy rule law
    contract goal result outcome effect cause change history memory model layer weight batch epoch dataset sample
    metric reward episode agent tool action state environment experiment run
    """
)

LITTLE = _words(
    """
    the a this that every each some any no one all most many few several another such its their our your my his her
    of in on at by for with from to into over under between about after before during without through against near
    behind and or but so because if when while where which who what how why then also only just still even never
    always often usually sometimes again now here there soon already almost very quite rather too more less most
    least well not can could may might must should will would shall do does did is are was were be been being has
    have had it they we you he she them us him need want like use keep let know think see look come go say work
    """
)

PATH_PARTS = _words(
    """
    src lib bin etc var tmp home data docs test tests config main app core util index notes report input output
    readme server client model train eval log cache build dist images public shared
    """
)
EXTENSIONS = _words("txt md py js json csv toml yaml html log sh rs go c")
COMMANDS = [
    *("ls", "ls -la", "pwd", "cat", "echo", "grep -n"),
    *("git status", "git log", "git diff", "make test", "pytest -q"),
]

_CONSONANTS = "bcdfghjklmnprstvwz"
_VOWELS = "aeiou"


def invented(rng: Random) -> str:
    """A word that nobody knows, such as `zorbif`."""
    parts = [rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.randint(2, 3))]
    return "".join(parts) + (rng.choice(_CONSONANTS) if rng.random() < 0.6 else "")


def code(rng: Random) -> str:
    """An identifier such as `K7-204` or `a93fx`."""
    letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(rng.randint(1, 3)))
    digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(1, 4)))
    mark = rng.choice(["", "-", "_", "/"])
    joined = letters + mark + digits
    return joined.lower() if rng.random() < 0.3 else joined


def path(rng: Random) -> str:
    """A file's path."""
    parts = [rng.choice(PATH_PARTS) for _ in range(rng.randint(1, 3))]
    lead = rng.choice(["", "", "/", "./", "~/"])
    return lead + "/".join(parts) + "." + rng.choice(EXTENSIONS)


def phrase(rng: Random) -> str:
    """Two to four words without grammar's blessing."""
    kind = rng.random()
    if kind < 0.4:
        return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    if kind < 0.7:
        return f"{rng.choice(VERBS)} the {rng.choice(NOUNS)}"
    link = ["for", "of", "in", "with", "and"]
    return f"{rng.choice(NOUNS)} {rng.choice(link)} {rng.choice(ADJECTIVES)} {rng.choice(THINGS)}"


def sentence(rng: Random) -> str:
    """A filler sentence."""
    kind = rng.randrange(6)
    if kind == 0:
        made = f"the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} is "
        made += f"{rng.choice(['not ', '', 'very '])}{rng.choice(ADJECTIVES)}"
    elif kind == 1:
        made = f"{rng.choice(VERBS)} the {rng.choice(NOUNS)} before you {rng.choice(VERBS)} the {rng.choice(NOUNS)}"
    elif kind == 2:
        made = f"{rng.choice(NAMES)} {rng.choice(['can', 'will', 'must', 'should', 'may not'])} {rng.choice(VERBS)} "
        made += f"{rng.choice(['a', 'the', 'every', 'this'])} {rng.choice(NOUNS)} in {rng.choice(CITIES)}"
    elif kind == 3:
        made = f"if the {rng.choice(NOUNS)} is {rng.choice(ADJECTIVES)}, {rng.choice(VERBS)} the {rng.choice(NOUNS)}"
    elif kind == 4:
        kinds = (LITTLE, LITTLE, NOUNS, VERBS, ADJECTIVES)
        made = " ".join(rng.choice(rng.choice(kinds)) for _ in range(rng.randint(5, 12)))
    else:
        made = f"do not {rng.choice(VERBS)} more than {rng.randint(2, 99)} {rng.choice(COUNTED)}"
    return made[0].upper() + made[1:] + rng.choice([".", ".", ".", ".", "!", ";"])


def paragraph(rng: Random, sentences: int) -> str:
    """Filler text."""
    return " ".join(sentence(rng) for _ in range(sentences))


def handbook(rng: Random, blocks: int) -> str:
    """Long instructions of the kind that agents put into their system prompts."""
    made = []
    for _ in range(blocks):
        kind = rng.randrange(6)
        if kind == 0:
            made.append(f"{'#' * rng.randint(1, 3)} {phrase(rng).capitalize()}")
        elif kind == 1:
            mark = rng.choice(["-", "*", "1."])
            made.append("\n".join(f"{mark} {sentence(rng)}" for _ in range(rng.randint(2, 5))))
        elif kind == 2:
            name = rng.choice(NOUNS)
            made.append(f"<{name}>\n{sentence(rng)}\n</{name}>")
        elif kind == 3:
            made.append(f"```\n{rng.choice(COMMANDS)} {path(rng)}\n```")
        elif kind == 4:
            made.append("\n".join(_fact(rng) for _ in range(rng.randint(2, 4))))
        else:
            made.append(paragraph(rng, rng.randint(2, 5)))
    return "\n\n".join(made)


def _fact(rng: Random) -> str:
    return f"{rng.choice(NOUNS).capitalize()}: {rng.choice([path(rng), code(rng), phrase(rng)])}"
