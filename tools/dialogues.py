"""Synthetic chats whose later questions can only be answered from earlier turns.

The demo model learns from them and is measured on them: nothing here comes from a data set. A chat tells facts (a name,
a city, a code ...), keeps a shopping list, makes small talk, and asks. Users write as people do: some without capitals
or a full stop, some with contractions, some with a greeting in front; some chats open with a system message.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field


def _lines(text: str) -> tuple[str, ...]:
    """The phrases of ``text``, which stand one per line or between bars."""
    return tuple(phrase for line in text.strip().splitlines() for phrase in line.split("|"))


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words("""
Adam Aisha Alan Alice Amara Anna Anton Ben Bob Bruno Carl Clara Daniel David Dora Elif Emma Eric Erin Eva Fatima Frank
George Gina Hannah Henry Ida Ines Ivan Jack Jane Jonas Julia Kai Karim Kate Laura Leo Lin Lucas Maria Marta Mia Mohammed
Nina Noah Olga Oliver Omar Paul Petra Pierre Rita Robin Rosa Ruth Sam Sara Sven Tariq Tim Tom Vera Walter Yuki Zoe""")
UNSEEN_NAMES = _words("""
Agatha Balthazar Cordelia Desmond Evangeline Florian Guinevere Horatio Isidora Jocasta Lysander Magnolia Nathaniel
Octavia Philippa Reginald Seraphina Tobias Winifred Zachary""")
CITIES = _words("""
Amsterdam Athens Bergen Berlin Bogota Boston Cairo Chicago Dakar Delhi Dublin Hamburg Hanoi Istanbul Kyoto Lagos Lima
Lisbon London Lyon Madrid Melbourne Milan Montreal Nairobi Oslo Paris Porto Prague Rome Seattle Seoul Sydney Tokyo
Vienna""")
COLORS = _words("amber beige black blue brown cyan gold green grey indigo orange pink purple red silver white yellow")
FOODS = _words("""
bread burgers cake cheese chili chocolate curry dumplings lasagna noodles pancakes pasta pizza rice salad soup sushi
tacos""")
JOBS = _words("baker barber carpenter chef dentist designer doctor driver farmer lawyer nurse painter pilot teacher")
GOODS = _words("""
apples bananas batteries beans bread butter candles carrots cheese chicken coffee eggs fish flour garlic grapes honey
juice lemons milk mushrooms nuts oil onions paper pepper potatoes rice salt soap spinach sugar tea tofu tomatoes yogurt
""")
SYLLABLES = _words("""
al an bar bel cor da del en fa fen ga har in jo ka kel la lo mar mi na nor o pel ra ri sa sel ta tor u ve wi yan zo""")
CONSONANTS, VOWELS = "bcdfghjklmnprstvwz", "aeiouy"

HELPLESS = "I am only a tiny demo model. Tell me a fact about yourself and ask me later."
SMALL_TALK = {
    "Hi|Hi!|Hello.|Hey!|Hello there.|Good morning!|Good evening.|Hi there!": "Hello! Tell me something to remember.",
    "Who are you?|What are you?|Hello, who are you?|What is your name?": "I am the demo model of this server.",
    "What can you do?|Help|Can you help me?|How does it work?|Hi, what can you do?": "I remember what you tell me.",
    "How are you?|Hi, how are you?|How is it going?|How are you doing?": "I am fine, thank you.",
    "Thanks!|Thank you.|Great, thanks!|Cool, thank you!": "You are welcome.",
    "Ok.|Okay.|Good.|Nice!|I see.|Yes.|No.|Sure.|Test": "All right. What else?",
    "Bye|Goodbye!|See you later.|Good night.": "Goodbye! I will keep this session.",
    "What do you know about me?|What do you remember?|What did I tell you?": "Ask me for one thing that you told me.",
    "Tell me a joke.|Do you know a joke?": "A cache walks into a bar. The barman says: the usual?",
}
OFF_TOPIC = _lines("""
What is the capital of {c}?|Who was {n}?|Write a poem about {g}.|How do I cook {g}?|Why is the sky {k}?|What time is it?
What is {d} plus {d}?|What is {d} times {d}?|Explain {g} to me.|Tell me a story about {n}.|Tell me about {c}.
Translate {g} into French.|How far is {c}?|Write a python function.|What is the weather in {c}?|Who won the game?
Do you like {g}?|Is {k} better than {k}?|What is the meaning of life?|How old is {n}?|Where is {c}?|Write code for {g}.
Why do people like {g}?|Who is the president?""")
ECHO = _lines("Repeat after me: {v}|Say: {v}|Please repeat: {v}|Say {v}|Echo: {v}|Say exactly: {v}|Repeat: {v}")
SYSTEM = _lines("""
You are a helpful assistant.|You are a friendly assistant called {n}.|Answer briefly.|Be polite.|You work in {c}.
You are a helpful and precise assistant. Answer in English.|Be brief. Never talk about {g}.|You are an expert on {g}.
Today is day {d}. The user likes {g}.|You help customers of a shop in {c} to buy {g}.""")
READ_LIST = _lines(
    "What is on my shopping list?|Show my list.|Show the list.|Read my shopping list.|What is on my list?"
)
ADD = _lines(
    "Add {v} to my shopping list.|Add {v} to the list.|Put {v} on the list.|I need {v}.|I need to buy {v}.|Buy {v}."
)
REMOVE = _lines("Remove {v} from the list.|Take {v} off my list.")


@dataclass(frozen=True)
class Turn:
    """``values`` is what the answer must recall (empty unless ``kind`` is "ask"), spelled as the user spelled it."""

    user: str
    assistant: str
    kind: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dialogue:
    """``system`` is None or (role, text), where the role is "system" or "developer"."""

    system: tuple[str, str] | None
    turns: tuple[Turn, ...]


@dataclass
class Words:
    """Draws values. ``unseen`` swaps the listed names for those that no training chat contains."""

    rng: random.Random
    unseen: bool = False

    def invent(self) -> str:
        if self.rng.random() < 0.4 or self.unseen:
            return "".join(self.rng.choices(SYLLABLES, k=self.rng.randint(2, 3))).capitalize()
        start = self.rng.randint(0, 1)
        letters = (self.rng.choice((CONSONANTS, VOWELS)[(i + start) % 2]) for i in range(self.rng.randint(3, 8)))
        return "".join(letters).capitalize()

    def make_list(self, words: tuple[str, ...], share: float) -> str:
        return self.rng.choice(words) if self.rng.random() < share else self.invent()

    def name(self) -> str:
        return self.make_list(UNSEEN_NAMES if self.unseen else NAMES, 0.45)

    def city(self) -> str:
        return self.make_list(CITIES, 0.7)

    def color(self) -> str:
        return self.make_list(COLORS, 0.8).lower()

    def food(self) -> str:
        return self.make_list(FOODS, 0.7).lower()

    def job(self) -> str:
        return self.make_list(JOBS, 0.7).lower()

    def goods(self) -> str:
        return self.make_list(GOODS, 0.7).lower()

    def age(self) -> str:
        return str(self.rng.randint(5, 99))

    def number(self) -> str:
        return str(self.rng.randint(0, 10 ** self.rng.randint(2, 4) - 1))

    def code(self) -> str:
        alphabet = "0123456789" if self.rng.random() < 0.8 else "ABCDEFGHKLMNPRSTUVWXYZ0123456789"
        return "".join(self.rng.choices(alphabet, k=self.rng.choice((4, 4, 5, 6))))

    def fill(self, pattern: str) -> str:
        """``pattern`` with {n} a name, {c} a city, {g} goods, {k} a color, {d} a number."""
        return pattern.format(n=self.name(), c=self.city(), g=self.goods(), k=self.color(), d=self.number())


@dataclass(frozen=True)
class Fact:
    """How one kind of fact is told, noted, asked for, answered, and missed; ``{v}`` is its value."""

    value: Callable[[Words], str]
    tell: str
    noted: str
    ask: str
    answer: str
    untold: str


FACTS = {
    "name": Fact(
        Words.name,
        "My name is {v}.|I am {v}.|Please call me {v}.|Call me {v}.|You can call me {v}.",
        "Nice to meet you, {v}!",
        "What is my name?|Who am I?|Do you know my name?|Do you remember my name?|Tell me my name.",
        "Your name is {v}.",
        "You have not told me your name yet.",
    ),
    "city": Fact(
        Words.city,
        "I live in {v}.|My city is {v}.|I am from {v}.|I moved to {v}.|My home is in {v}.",
        "I noted that you live in {v}.",
        "Where do I live?|What is my city?|Which city do I live in?|Where am I from?|Where is my home?",
        "You live in {v}.",
        "You have not told me where you live yet.",
    ),
    "color": Fact(
        Words.color,
        "My favorite color is {v}.|My favourite colour is {v}.|I like the color {v}.|I love the color {v}.",
        "I noted that you like {v}.",
        "What is my favorite color?|What is my favourite colour?|Which color do I like?",
        "Your favorite color is {v}.",
        "You have not told me your favorite color yet.",
    ),
    "food": Fact(
        Words.food,
        "My favorite food is {v}.|I like to eat {v}.|I love eating {v}.|My favourite food is {v}.",
        "I noted that you like {v}.",
        "What is my favorite food?|What do I like to eat?|What is my favourite food?",
        "Your favorite food is {v}.",
        "You have not told me your favorite food yet.",
    ),
    "job": Fact(
        Words.job,
        "I work as a {v}.|My job is {v}.|I am a {v}.",
        "I noted that you are a {v}.",
        "What is my job?|What do I do for work?|What do I do?|What do I work as?",
        "You work as a {v}.",
        "You have not told me your job yet.",
    ),
    "pet": Fact(
        Words.name,
        "My pet is called {v}.|The name of my pet is {v}.|My dog is called {v}.|I have a cat named {v}.",
        "I noted your pet {v}.",
        "What is my pet called?|What is the name of my pet?|Who is my pet?",
        "Your pet is called {v}.",
        "You have not told me about a pet yet.",
    ),
    "friend": Fact(
        Words.name,
        "My best friend is {v}.|My friend is called {v}.|I have a friend called {v}.",
        "I noted your friend {v}.",
        "Who is my best friend?|What is my friend called?|What is my friend's name?|Who is my friend?",
        "Your best friend is {v}.",
        "You have not told me about a friend yet.",
    ),
    "number": Fact(
        Words.number,
        "My lucky number is {v}.|Remember the number {v}.|The number is {v}.|My number is {v}.",
        "I will remember {v}.",
        "What is my lucky number?|What is the number?|What is my number?|Which number did I tell you?",
        "Your number is {v}.",
        "You have not told me a number yet.",
    ),
    "code": Fact(
        Words.code,
        "My secret code is {v}.|The code is {v}.|The door code is {v}.|Remember the code {v}.",
        "I will keep the code {v}.",
        "What is the code?|What is my code?|What is my secret code?|What is the door code?",
        "The code is {v}.",
        "You have not told me a code yet.",
    ),
    "age": Fact(
        Words.age,
        "I am {v} years old.|My age is {v}.",
        "I noted that you are {v}.",
        "How old am I?|What is my age?",
        "You are {v} years old.",
        "You have not told me your age yet.",
    ),
}


@dataclass(frozen=True)
class Style:
    """How one message is typed."""

    lower: bool
    bare: bool
    contract: bool

    @classmethod
    def draw(cls, rng: random.Random) -> Style:
        return cls(rng.random() < 0.25, rng.random() < 0.3, rng.random() < 0.3)

    def spell(self, text: str) -> str:
        return text.lower() if self.lower else text

    def type(self, text: str) -> str:
        if self.contract:
            for long, short in (("name is", "name's"), ("What is", "What's"), ("I am", "I'm"), ("Who is", "Who's")):
                text = text.replace(long, short)
        return self.spell(text.rstrip(".?!") if self.bare else text)


@dataclass
class Speaker:
    """One user's side of a chat with the answers due; ``known`` and ``basket`` are what was told so far."""

    rng: random.Random
    words: Words
    known: dict[str, str] = field(default_factory=dict)
    basket: list[str] = field(default_factory=list)

    def tell(self) -> Turn:
        """One fact or two, mostly new ones; a known one is corrected."""
        style = Style.draw(self.rng)
        said: list[str] = []
        noted: list[str] = []
        for _ in range(2 if self.rng.random() < 0.12 else 1):
            new = [slot for slot in FACTS if slot not in self.known]
            slot = self.rng.choice(new if new and self.rng.random() < 0.85 else list(FACTS))
            value = style.spell(FACTS[slot].value(self.words))
            correction = "Actually: " if slot in self.known and self.rng.random() < 0.5 else ""
            self.known[slot] = value
            said.append(correction + self.rng.choice(FACTS[slot].tell.split("|")).format(v=value).rstrip("."))
            noted.append(FACTS[slot].noted.format(v=value))
        greeting = self.rng.choice(("Hi, ", "Hello! ", "Hey, ")) if self.rng.random() < 0.15 else ""
        return Turn(
            style.type(greeting + (". " if not style.bare else " and ").join(said) + "."), " ".join(noted), "tell"
        )

    def ask(self) -> Turn:
        slot = self.rng.choice(list(self.known))
        user = Style.draw(self.rng).type(self.rng.choice(FACTS[slot].ask.split("|")))
        return Turn(user, FACTS[slot].answer.format(v=self.known[slot]), "ask", (self.known[slot],))

    def ask_untold(self) -> Turn:
        slots = [slot for slot in FACTS if slot not in self.known]
        if not slots:
            return self.ask()
        fact = FACTS[self.rng.choice(slots)]
        return Turn(Style.draw(self.rng).type(self.rng.choice(fact.ask.split("|"))), fact.untold, "untold")

    def shop(self) -> Turn:
        """Add to the shopping list, take from it, or have it read."""
        chance, done = self.rng.random(), ""
        if chance < 0.4 or len(self.basket) >= 6:
            user = self.rng.choice(READ_LIST)
        elif self.basket and chance < 0.5:
            item = self.rng.choice(self.basket)
            self.basket.remove(item)
            user, done = self.rng.choice(REMOVE).format(v=item), f"Removed {item}. "
        else:
            wanted = {self.words.goods(): None for _ in range(2 if self.rng.random() < 0.15 else 1)}
            items = [item for item in wanted if item not in self.basket] or [self.words.invent().lower()]
            self.basket += items
            user, done = self.rng.choice(ADD).format(v=" and ".join(items)), f"Added {' and '.join(items)}. "
        answer = done + (f"Your list: {', '.join(self.basket)}." if self.basket else "Your list is empty.")
        values = () if done or not self.basket else (", ".join(self.basket),)
        return Turn(Style.draw(self.rng).type(user), answer, "ask" if values else "list", values)

    def echo(self) -> Turn:
        draws = (self.words.invent, self.words.number, self.words.name, self.words.goods)
        text = " ".join(self.rng.choice(draws)() for _ in range(self.rng.randint(1, 6)))
        return Turn(self.rng.choice(ECHO).format(v=text), f"You said: {text}", "echo")

    def chat(self) -> Turn:
        """Small talk, or a question far beyond a tiny model."""
        if self.rng.random() < 0.35:
            user, answer = self.words.fill(self.rng.choice(OFF_TOPIC)), HELPLESS
        else:
            users, answer = self.rng.choice(list(SMALL_TALK.items()))
            user = self.rng.choice(users.split("|"))
        return Turn(Style.draw(self.rng).type(user), answer, "chat")


def dialogue(rng: random.Random, turns: int, unseen: bool = False) -> Dialogue:
    """A chat of ``turns`` turns; the last one asks if anything was told."""
    speaker = Speaker(rng, Words(rng, unseen))
    shopping = 0.22 if rng.random() < 0.35 or turns > 8 else 0.0
    moves = (speaker.tell, speaker.ask, speaker.shop, speaker.chat, speaker.ask_untold, speaker.echo)
    said: list[Turn] = []
    for index in range(turns):
        move = rng.choices(moves, (0.34, 0.32, shopping, 0.13, 0.06, 0.07))[0]
        if move == speaker.ask and not speaker.known:
            move = speaker.ask_untold if rng.random() < 0.3 else speaker.tell
        if index == turns - 1 and speaker.known:
            move = speaker.ask
        said.append(move())
    role = rng.choice(("system", "system", "system", "developer"))
    system = (role, speaker.words.fill(rng.choice(SYSTEM))) if rng.random() < 0.25 else None
    return Dialogue(system, tuple(said))
